/* Numbers of FP8 (e4m3), and blocks of them that share a scale. */

#pragma once

#include "vectors.h"

#define BLOCK 128
#define TWO (2 * LANES)

typedef uint8_t codes __attribute__((vector_size(32)));

/* The value of an e4m3 number over 256: in the place of float16's exponent and mantissa it is so much too small. NaN
 * becomes a number. */
INLINE float small(uint8_t code) {
    uint32_t size = code & 0x7f;
    union { uint32_t u; float f; } v = {(size << 20) + (112u << 23)};
    float value = size < 8 ? (float)size * 0x1p-17f : v.f;
    return code & 0x80 ? -value : value;
}

/* The values of TWO numbers over 256. */
INLINE void load_small(const uint8_t *p, floats *low, floats *high) {
#if LANES == 16
    __m512i bits = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)p)), 7);
    bits = _mm512_and_si512(bits, _mm512_set1_epi16((short)0xBFFF));
    *low = (floats)_mm512_cvtph_ps(_mm512_castsi512_si256(bits));
    *high = (floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
#elif defined(HAVE_FLOAT16)
    __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p)), 7);
    bits = _mm256_and_si256(bits, _mm256_set1_epi16((short)0xBFFF));
    *low = (floats)_mm256_cvtph_ps(_mm256_castsi256_si128(bits));
    *high = (floats)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
#else
    for (int i = 0; i < LANES; i++) (*low)[i] = small(p[i]), (*high)[i] = small(p[LANES + i]);
#endif
}

/* Whether one of `n` numbers is NaN. */
INLINE int holds_nan(const uint8_t *p, i64 n) {
    codes found = {0};
    i64 i = 0;
    for (; i + 128 <= n; i += 128)
        for (int u = 0; u < 128; u += 32) {
            codes x;
            memcpy(&x, p + i + u, sizeof x);
            found |= (codes)((x & 0x7f) == 0x7f);
        }
    int any = 0;
    for (; i < n; i++) any |= (p[i] & 0x7f) == 0x7f;
    uint64_t words_of[4];
    memcpy(words_of, &found, sizeof found);
    return any || (words_of[0] | words_of[1] | words_of[2] | words_of[3]);
}

INLINE float from_e4m3(uint8_t code) { return (code & 0x7f) == 0x7f ? NAN : 256 * small(code); }

INLINE i64 blocks_of(i64 n) { return (n + BLOCK - 1) / BLOCK; }

/* As `quantize_fp8` in fp8.c, of one row. */
void quantize_row(const bf16 *x, i64 n, int ue8m0, uint8_t *numbers, float *scales);
