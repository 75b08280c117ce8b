/* Included before a kernel's source: allows so many allocations and no more, and counts those that are not given back. */

#pragma once

#include <immintrin.h> /* has functions that are called free and posix_memalign */
#include <stdlib.h>

/* Threads share loops out evenly, whoever is quicker: one that lacks memory meets what the others read. */
#define schedule(...) schedule(static, 1)

#define SHARED __attribute__((weak, visibility("default")))

SHARED long allocations_left, allocations_held;

static inline int may_allocate(void) {
    if (__atomic_fetch_sub(&allocations_left, 1, __ATOMIC_RELAXED) <= 0) return 0;
    __atomic_fetch_add(&allocations_held, 1, __ATOMIC_RELAXED);
    return 1;
}

static inline void give_back_counted(void *at) {
    if (at) __atomic_fetch_sub(&allocations_held, 1, __ATOMIC_RELAXED);
    free(at);
}

#define malloc(bytes) (may_allocate() ? malloc(bytes) : NULL)
#define posix_memalign(at, alignment, bytes) (may_allocate() ? posix_memalign(at, alignment, bytes) : 12)
#define free give_back_counted
