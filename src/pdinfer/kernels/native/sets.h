/* Lanes and instruction sets, by what the compiler says that it may use. All sources ask here, and nothing goes by the name
 * of a CPU: compilers give a name of last year to the CPU of this year. */

#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LANES 16 /* float32 values in a vector */
#else
#define LANES 8
#endif

#if LANES == 16 && defined(__AVX512BF16__)
#define HAVE_BF16 /* multiplies pairs of bf16 values */
#endif

#if LANES == 16 && defined(__AVX512VNNI__)
#define HAVE_VNNI /* multiplies bytes, four at a time */
#endif

#if LANES == 8 && defined(__AVX2__)
#define HAVE_AVX2 /* vectors of 8 lanes are those of the CPU */
#endif

#if LANES == 16 || (defined(HAVE_AVX2) && defined(__F16C__))
#define HAVE_FLOAT16 /* converts numbers of float16 */
#endif

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define HAVE_AMX
#endif

#if LANES == 16 || defined(HAVE_AVX2) || defined(HAVE_AMX)
#include <immintrin.h>
#endif
