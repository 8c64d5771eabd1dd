/* What the peers' programs of `cargo xtask bench compare` share: cases, data, checks, pinning.
 *
 * benches/src/compare/ours.rs does the same for our side; change both or neither. A case is OP:BYTES:ITERATIONS:WARM_UP; BYTES
 * is a multiple of what the operation divides among the ranks. Results go to rank 0's standard output, one `row OP BYTES
 * ITERATIONS MICROSECONDS` each, then `done`. */
#ifndef RULER_H
#define RULER_H

#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

enum ruler_op { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, BARRIER, SEND_RECV, RULER_OPS };

static const char *const ruler_names[RULER_OPS] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                                   "all_to_all", "barrier",        "send_recv"};

struct ruler_case {
    enum ruler_op op;
    size_t bytes, elements;
    long iterations, warm_up;
};

/* Ends with the harness's own words; the caller of this program shows them. */
static void ruler_fail(const char *what, const char *detail) {
    fprintf(stderr, "ruler: %s: %s\n", what, detail);
    exit(2);
}

/* Takes the first case off the list; 0 at its end. */
static int ruler_next(char **list, struct ruler_case *c) {
    char *text = strsep(list, ",");
    if (!text || !*text) return 0;
    char whole[128], name[32];
    snprintf(whole, sizeof whole, "%s", text);
    if (sscanf(text, "%31[^:]:%zu:%ld:%ld", name, &c->bytes, &c->iterations, &c->warm_up) != 4 || c->iterations < 1 ||
        c->warm_up < 0)
        ruler_fail("not OP:BYTES:ITERATIONS:WARM_UP", whole);
    int op = 0;
    while (op < RULER_OPS && strcmp(name, ruler_names[op])) op++;
    if (op == RULER_OPS) ruler_fail("unknown operation", name);
    c->op = (enum ruler_op)op;
    c->elements = c->bytes / sizeof(float);
    if (c->op != BARRIER && c->elements == 0) ruler_fail("less than an element", whole);
    return 1;
}

/* The deadline, the parent's death, and the core: before the library starts its threads, which inherit the core. */
static void ruler_start(int rank, int pinned, unsigned limit_s) {
    alarm(limit_s);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (!pinned) return;
    cpu_set_t allowed, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof allowed, &allowed)) ruler_fail("sched_getaffinity", "the cores cannot be read");
    int nth = rank % CPU_COUNT(&allowed);
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &allowed) && nth-- == 0) CPU_SET(core, &one);
    if (sched_setaffinity(0, sizeof one, &one)) ruler_fail("sched_setaffinity", "the rank cannot be pinned");
}

/* Element i of what a rank contributes: 1 to 128, so that sums are exact and blocks in the wrong place show. */
static float ruler_value(int rank, size_t i) {
    return (float)((((uint32_t)i + (uint32_t)rank * 40503u) * 2654435761u >> 25) + 1u);
}

static float ruler_sum(int world, size_t i) {
    float sum = 0;
    for (int r = 0; r < world; r++) sum += ruler_value(r, i);
    return sum;
}

/* Fills `count` elements with the rank's values from element `from` on. */
static void ruler_fill(float *x, size_t count, int rank, size_t from) {
    for (size_t i = 0; i < count; i++) x[i] = ruler_value(rank, from + i);
}

/* Checks `count` elements against the values of `rank`, or against the sums over `world` ranks if that is not 0. */
static void ruler_check(const struct ruler_case *c, int me, const float *x, size_t count, int rank, int world,
                        size_t from) {
    for (size_t i = 0; i < count; i++) {
        float want = world ? ruler_sum(world, from + i) : ruler_value(rank, from + i);
        if (x[i] != want) {
            char text[160];
            snprintf(text, sizeof text, "rank %d has %g instead of %g at element %zu of %s of %zu bytes", me,
                     (double)x[i], (double)want, i, ruler_names[c->op], c->bytes);
            ruler_fail("a wrong result", text);
        }
    }
}

#endif
