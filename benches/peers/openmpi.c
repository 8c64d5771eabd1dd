/* Open MPI's side of `cargo xtask bench compare`: mpirun … openmpi PINNED LIMIT_S CASES; see ruler.h. */
#include <mpi.h>

#include "ruler.h"

static int me, world;

/* One operation. `a` is the large buffer of what is divided, `b` the one for blocks or results. */
static void once(const struct ruler_case *c, float *a, float *b, long i) {
    int all = (int)c->elements, block = all / world;
    switch (c->op) {
    case ALL_REDUCE: MPI_Allreduce(MPI_IN_PLACE, a, all, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case REDUCE_SCATTER: MPI_Reduce_scatter_block(a, b, block, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case ALL_GATHER: MPI_Allgather(b, block, MPI_FLOAT, a, block, MPI_FLOAT, MPI_COMM_WORLD); break;
    case BROADCAST: MPI_Bcast(a, all, MPI_FLOAT, (int)(i % world), MPI_COMM_WORLD); break;
    case ALL_TO_ALL: MPI_Alltoall(a, block, MPI_FLOAT, b, block, MPI_FLOAT, MPI_COMM_WORLD); break;
    case SEND_RECV: {
        int peer = me ^ 1;
        if (me < peer) MPI_Send(a, all, MPI_FLOAT, peer, 9, MPI_COMM_WORLD);
        MPI_Recv(a, all, MPI_FLOAT, peer, 9, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (me > peer) MPI_Send(a, all, MPI_FLOAT, peer, 9, MPI_COMM_WORLD);
        break;
    }
    default: MPI_Barrier(MPI_COMM_WORLD); break;
    }
}

static void verify(const struct ruler_case *c, float *a, float *b) {
    size_t all = c->elements, block = all / (size_t)world;
    switch (c->op) {
    case ALL_REDUCE:
        ruler_fill(a, all, me, 0);
        once(c, a, b, 0);
        ruler_check(c, me, a, all, 0, world, 0);
        break;
    case REDUCE_SCATTER:
        ruler_fill(a, all, me, 0);
        once(c, a, b, 0);
        ruler_check(c, me, b, block, 0, world, (size_t)me * block);
        break;
    case ALL_GATHER:
        ruler_fill(b, block, me, 0);
        once(c, a, b, 0);
        for (int r = 0; r < world; r++) ruler_check(c, me, a + (size_t)r * block, block, r, 0, 0);
        break;
    case BROADCAST:
        for (int root = 0; root < world; root++) {
            ruler_fill(a, all, me, 0);
            once(c, a, b, root);
            ruler_check(c, me, a, all, root, 0, 0);
        }
        break;
    case ALL_TO_ALL:
        ruler_fill(a, all, me, 0);
        once(c, a, b, 0);
        for (int r = 0; r < world; r++) ruler_check(c, me, b + (size_t)r * block, block, r, 0, (size_t)me * block);
        break;
    case SEND_RECV: {
        /* As `once`, with values of one's own on the way back. */
        int peer = me ^ 1;
        ruler_fill(a, all, me, 0);
        if (me < peer) MPI_Send(a, (int)all, MPI_FLOAT, peer, 9, MPI_COMM_WORLD);
        MPI_Recv(a, (int)all, MPI_FLOAT, peer, 9, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        ruler_check(c, me, a, all, peer, 0, 0);
        ruler_fill(a, all, me, 0);
        if (me > peer) MPI_Send(a, (int)all, MPI_FLOAT, peer, 9, MPI_COMM_WORLD);
        break;
    }
    default: once(c, a, b, 0); break;
    }
}

int main(int argc, char **argv) {
    if (argc != 4) ruler_fail("usage", "openmpi PINNED LIMIT_S CASES, under mpirun");
    const char *local = getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    ruler_start(local ? atoi(local) : 0, atoi(argv[1]), (unsigned)atoi(argv[2]));
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    char *cases = argv[3];
    struct ruler_case c;
    while (ruler_next(&cases, &c)) {
        size_t room = c.bytes ? c.bytes : sizeof(float);
        float *a = malloc(room), *b = malloc(room);
        if (!a || !b) ruler_fail("no memory", argv[3]);
        /* Every page of both is there before anything is timed, and sums of zeros stay what they are. */
        memset(a, 0, room);
        memset(b, 0, room);
        verify(&c, a, b);
        memset(a, 0, room);
        memset(b, 0, room);
        for (long i = 0; i < c.warm_up; i++) once(&c, a, b, i);
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        for (long i = 0; i < c.iterations; i++) once(&c, a, b, i);
        MPI_Barrier(MPI_COMM_WORLD);
        double us = (MPI_Wtime() - start) * 1e6 / (double)c.iterations;
        verify(&c, a, b);
        if (c.op == SEND_RECV) us /= 2;
        if (me == 0) printf("row %s %zu %ld %.4f\n", ruler_names[c.op], c.bytes, c.iterations, us);
        fflush(stdout);
        free(a);
        free(b);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (me == 0) printf("done\n");
    fflush(stdout);
    MPI_Finalize();
    return 0;
}
