/* Memory that threads keep from call to call. */

#pragma once

#include "vectors.h"

/* Memory of this thread; one of a few. What it held is lost when it grows. NULL when there is not so much. */
void *room(int which, i64 bytes);
