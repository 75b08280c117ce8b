/* The way of AMX tiles to multiply rows by strips. */

#pragma once

#include "strips.h"

/* NULL where there are no tiles. */
const Way *by_tiles_or_null(void);

/* The better of the ways there are. */
INLINE const Way *best_way(void) {
    const Way *tiles = by_tiles_or_null();
    return tiles ? tiles : &by_floats;
}
