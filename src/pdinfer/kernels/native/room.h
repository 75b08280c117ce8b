/* Memory that threads keep from call to call. */

#pragma once

#include <stdint.h>

/* Memory of this thread; one of a few. What it held is lost when it grows. NULL when there is not so much. */
void *room(int which, int64_t bytes);
