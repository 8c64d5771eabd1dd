// Gloo's side of `cargo xtask bench compare`: gloo RANK WORLD FOLDER PINNED LIMIT_S CASES, once per rank; see ruler.h.
//
// Over Gloo's TCP transport on 127.0.0.1, the only one it has between processes of one host. Operations are those of its
// present interface; reduce_scatter, which that lacks, is the class for it. With long messages its results are wrong now and then:
// ranks other than 0 copy their block to the front of the buffer while the send from there may still go on.
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include "ruler.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Side {
    std::shared_ptr<gloo::Context> context;
    int me, world;
    ruler_case c;
    std::vector<float> a, b;
    std::unique_ptr<gloo::Algorithm> reduce_scatter;
    std::unique_ptr<gloo::transport::UnboundBuffer> message;

    Side(const std::shared_ptr<gloo::Context> &with, const ruler_case &what)
        : context(with), me(with->rank), world(with->size), c(what), a(c.elements ? c.elements : 1),
          b(c.elements ? c.elements : 1) {
        if (c.op == REDUCE_SCATTER)
            reduce_scatter.reset(new gloo::ReduceScatterHalvingDoubling<float>(
                context, {a.data()}, (int)c.elements, std::vector<int>(world, (int)block())));
        if (c.op == SEND_RECV) message = context->createUnboundBuffer(a.data(), c.bytes);
    }

    size_t block() const { return c.elements / (size_t)world; }

    void barrier() {
        gloo::BarrierOptions options(context);
        options.setTag(7);
        gloo::barrier(options);
    }

    void send() {
        message->send(me ^ 1, 9);
        message->waitSend();
    }

    void recv() {
        message->recv(me ^ 1, 9);
        message->waitRecv();
    }

    void once(long i) {
        switch (c.op) {
        case ALL_REDUCE: {
            gloo::AllreduceOptions options(context);
            options.setOutput(a.data(), c.elements);
            void (*sum)(void *, const void *, const void *, size_t) = &gloo::sum<float>;
            options.setReduceFunction(gloo::AllreduceOptions::Func(sum));
            options.setTag(1);
            gloo::allreduce(options);
            break;
        }
        case REDUCE_SCATTER: reduce_scatter->run(); break;
        case ALL_GATHER: {
            gloo::AllgatherOptions options(context);
            options.setInput(b.data(), block());
            options.setOutput(a.data(), c.elements);
            options.setTag(2);
            gloo::allgather(options);
            break;
        }
        case BROADCAST: {
            gloo::BroadcastOptions options(context);
            options.setOutput(a.data(), c.elements);
            options.setRoot((int)(i % world));
            options.setTag(3);
            gloo::broadcast(options);
            break;
        }
        case ALL_TO_ALL: {
            gloo::AlltoallOptions options(context);
            options.setInput(a.data(), c.elements);
            options.setOutput(b.data(), c.elements);
            options.setTag(4);
            gloo::alltoall(options);
            break;
        }
        case SEND_RECV:
            if (me % 2 == 0) send();
            recv();
            if (me % 2 == 1) send();
            break;
        default: barrier(); break;
        }
    }

    void verify() {
        size_t all = c.elements;
        switch (c.op) {
        case ALL_REDUCE:
            ruler_fill(a.data(), all, me, 0);
            once(0);
            ruler_check(&c, me, a.data(), all, 0, world, 0);
            break;
        case REDUCE_SCATTER:
            ruler_fill(a.data(), all, me, 0);
            once(0);
            ruler_check(&c, me, a.data(), block(), 0, world, (size_t)me * block());
            break;
        case ALL_GATHER:
            ruler_fill(b.data(), block(), me, 0);
            once(0);
            for (int r = 0; r < world; r++) ruler_check(&c, me, a.data() + (size_t)r * block(), block(), r, 0, 0);
            break;
        case BROADCAST:
            for (int root = 0; root < world; root++) {
                ruler_fill(a.data(), all, me, 0);
                once(root);
                ruler_check(&c, me, a.data(), all, root, 0, 0);
            }
            break;
        case ALL_TO_ALL:
            ruler_fill(a.data(), all, me, 0);
            once(0);
            for (int r = 0; r < world; r++)
                ruler_check(&c, me, b.data() + (size_t)r * block(), block(), r, 0, (size_t)me * block());
            break;
        case SEND_RECV:
            // As `once`, with values of one's own on the way back.
            ruler_fill(a.data(), all, me, 0);
            if (me % 2 == 0) send();
            recv();
            ruler_check(&c, me, a.data(), all, me ^ 1, 0, 0);
            ruler_fill(a.data(), all, me, 0);
            if (me % 2 == 1) send();
            break;
        default: once(0); break;
        }
    }

    void zero() {
        std::fill(a.begin(), a.end(), 0.0f);
        std::fill(b.begin(), b.end(), 0.0f);
    }

    void run() {
        verify();
        // Sums of zeros stay what they are.
        zero();
        for (long i = 0; i < c.warm_up; i++) once(i);
        barrier();
        auto start = Clock::now();
        for (long i = 0; i < c.iterations; i++) once(i);
        barrier();
        double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / (double)c.iterations;
        verify();
        if (c.op == SEND_RECV) us /= 2;
        if (me == 0) printf("row %s %zu %ld %.4f\n", ruler_names[c.op], c.bytes, c.iterations, us);
        fflush(stdout);
        barrier();
    }
};

} // namespace

int main(int argc, char **argv) {
    if (argc != 7) ruler_fail("usage", "gloo RANK WORLD FOLDER PINNED LIMIT_S CASES, once per rank");
    int rank = atoi(argv[1]), world = atoi(argv[2]);
    ruler_start(rank, atoi(argv[4]), (unsigned)atoi(argv[5]));
    try {
        gloo::transport::tcp::attr where("127.0.0.1");
        std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(where);
        gloo::rendezvous::FileStore store(argv[3]);
        auto context = std::make_shared<gloo::rendezvous::Context>(rank, world);
        context->setTimeout(std::chrono::seconds(atoi(argv[5])));
        context->connectFullMesh(store, device);
        char *cases = argv[6];
        ruler_case c;
        while (ruler_next(&cases, &c)) Side(context, c).run();
        if (rank == 0) printf("done\n");
        fflush(stdout);
        // Nobody closes while somebody still waits.
        gloo::BarrierOptions last(context);
        gloo::barrier(last);
    } catch (const std::exception &e) {
        ruler_fail("Gloo", e.what());
    }
    return 0;
}
