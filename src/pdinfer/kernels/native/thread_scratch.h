/* Memory that a thread keeps from call to call: an allocation of some megabytes is a system call and a fault per page,
 * which takes longer than a product of one row. */

#pragma once

#include <stdint.h>

/* What the memory of a thread is for. What one call holds at the same time has to differ. */
enum { SCRATCH_ROWS, SCRATCH_STRIP, SCRATCH_PARTS, SCRATCH_NUMBERS, NUM_SCRATCHES };

/* So many bytes of this thread, aligned for any vector. What they held is lost when they grow. NULL where there is not so
 * much memory. */
void *thread_scratch(int which, int64_t bytes);
