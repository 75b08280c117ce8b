/* Copies pieces of memory and digests them (xxh3_64) on the way, so that every byte is fetched from memory once.
 *
 * A digest takes in a stripe of 64 bytes at a time, sixteen of them to a block. The last stripe of all is digested
 * differently, so a stripe is taken in only once there is a byte behind it.
 *
 * See the specification of XXH3 (64 bits, no seed, more than 240 bytes) in the documents of xxHash.
 */

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PREFETCH(at) __builtin_prefetch(at)
#define EXPORT __attribute__((visibility("default")))

enum { STRIPE = 64, STRIPES_PER_BLOCK = 16, LANES = 8, LINE = 64, CHUNK = 2048, PREFETCH_BYTES = 2048 };

static const uint64_t PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87ULL, PRIME64_2 = 0xC2B2AE3D27D4EB4FULL,
                      PRIME64_3 = 0x165667B19E3779F9ULL, PRIME64_4 = 0x85EBCA77C2B2AE63ULL,
                      PRIME64_5 = 0x27D4EB2F165667C5ULL;

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
static const uint8_t *const SECRET_OF_BLOCK = SECRET + sizeof SECRET - STRIPE;
static const uint8_t *const SECRET_OF_LAST = SECRET + sizeof SECRET - STRIPE - 7;
static const uint8_t *const SECRET_OF_RESULT = SECRET + 11;

/* `bytes` holds the last stripe that was taken in, then `num_waiting` bytes that were not. */
typedef struct {
    uint64_t sums[LANES];
    uint64_t num_bytes;
    int64_t num_waiting;
    int64_t stripes;
    uint8_t bytes[2 * STRIPE];
} Digest;

static inline uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* -- stripes, on vectors of the widest kind there is, and in plain C ------------------------------------------------ */

#if defined(__AVX512F__)
#define VECTOR __m512i
#define LOAD(at) _mm512_loadu_si512((const void *)(at))
#define STORE(at, value) _mm512_storeu_si512((void *)(at), value)
#define STREAM(at, value) _mm512_stream_si512((void *)(at), value)
#define ADD _mm512_add_epi64
#define XOR _mm512_xor_si512
#define PRODUCT _mm512_mul_epu32
#define RIGHT _mm512_srli_epi64
#define LEFT _mm512_slli_epi64
#define SWAP(value) _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)0x4E)
#define ALL(value) _mm512_set1_epi64((long long)(value))
#elif defined(__AVX2__)
#define VECTOR __m256i
#define LOAD(at) _mm256_loadu_si256((const __m256i *)(at))
#define STORE(at, value) _mm256_storeu_si256((__m256i *)(at), value)
#define STREAM(at, value) _mm256_stream_si256((__m256i *)(at), value)
#define ADD _mm256_add_epi64
#define XOR _mm256_xor_si256
#define PRODUCT _mm256_mul_epu32
#define RIGHT _mm256_srli_epi64
#define LEFT _mm256_slli_epi64
#define SWAP(value) _mm256_shuffle_epi32(value, 0x4E)
#define ALL(value) _mm256_set1_epi64x((long long)(value))
#endif

#if defined(VECTOR)
enum { WIDTH = sizeof(VECTOR), VECTORS = STRIPE / WIDTH };

static inline void take(VECTOR sums[VECTORS], const uint8_t *stripe, const uint8_t *secret) {
    for (int i = 0; i < VECTORS; i++) {
        VECTOR data = LOAD(stripe + i * WIDTH), key = XOR(data, LOAD(secret + i * WIDTH));
        sums[i] = ADD(sums[i], ADD(PRODUCT(key, RIGHT(key, 32)), SWAP(data)));
    }
}

static inline void scramble(VECTOR sums[VECTORS]) {
    const VECTOR prime = ALL(PRIME32_1);
    for (int i = 0; i < VECTORS; i++) {
        VECTOR mixed = XOR(XOR(sums[i], RIGHT(sums[i], 47)), LOAD(SECRET_OF_BLOCK + i * WIDTH));
        sums[i] = ADD(PRODUCT(mixed, prime), LEFT(PRODUCT(RIGHT(mixed, 32), prime), 32));
    }
}
#else
typedef uint64_t VECTOR;
enum { VECTORS = LANES, WIDTH = 8 };
#define LOAD(at) (*(const uint64_t *)(at))
#define STORE(at, value) (*(uint64_t *)(at) = (value))

static inline void take(VECTOR sums[VECTORS], const uint8_t *stripe, const uint8_t *secret) {
    for (int i = 0; i < LANES; i++) {
        uint64_t data = word(stripe + 8 * i), key = data ^ word(secret + 8 * i);
        sums[i ^ 1] += data;
        sums[i] += (key & 0xFFFFFFFFU) * (key >> 32);
    }
}

static inline void scramble(VECTOR sums[VECTORS]) {
    for (int i = 0; i < LANES; i++)
        sums[i] = ((sums[i] ^ (sums[i] >> 47)) ^ word(SECRET_OF_BLOCK + 8 * i)) * PRIME32_1;
}
#endif

/* Take in `num` stripes that lie one after the other, and fetch as many bytes from `next` on meanwhile. */
static void take_stripes(Digest *digest, const uint8_t *from, int64_t num, const uint8_t *next) {
    VECTOR sums[VECTORS];
    for (int i = 0; i < VECTORS; i++)
        sums[i] = LOAD((uint8_t *)digest->sums + i * WIDTH);
    int64_t stripes = digest->stripes;
    for (int64_t i = 0; i < num; i++, from += STRIPE, next += STRIPE) {
        PREFETCH(next);
        take(sums, from, SECRET + 8 * stripes);
        if (++stripes == STRIPES_PER_BLOCK) {
            scramble(sums);
            stripes = 0;
        }
    }
    for (int i = 0; i < VECTORS; i++)
        STORE((uint8_t *)digest->sums + i * WIDTH, sums[i]);
    digest->stripes = stripes;
}

/* Digest `num` bytes where they lie, except those that share a stripe with the bytes before or behind them. */
static void read_bytes(Digest *digest, const uint8_t *from, int64_t num) {
    uint8_t *waiting = digest->bytes + STRIPE;
    digest->num_bytes += (uint64_t)num;
    if (digest->num_waiting + num > STRIPE) {
        if (digest->num_waiting) {
            int64_t missing = STRIPE - digest->num_waiting;
            memcpy(waiting + digest->num_waiting, from, (size_t)missing);
            take_stripes(digest, waiting, 1, from);
            memcpy(digest->bytes, waiting, STRIPE);
            from += missing;
            num -= missing;
        }
        int64_t stripes = (num - 1) / STRIPE;
        take_stripes(digest, from, stripes, from + PREFETCH_BYTES);
        from += stripes * STRIPE;
        num -= stripes * STRIPE;
        if (stripes)
            memcpy(digest->bytes, from - STRIPE, STRIPE);
        digest->num_waiting = 0;
    }
    memcpy(waiting + digest->num_waiting, from, (size_t)num);
    digest->num_waiting += num;
}

/* -- copies --------------------------------------------------------------------------------------------------------- */

/* Copy `num` bytes past the caches, since nobody reads them soon. */
static void copy(uint8_t *restrict to, const uint8_t *restrict from, int64_t num) {
    int64_t at = 0;
#if defined(STREAM)
    at = -(int64_t)(uintptr_t)to & (LINE - 1);
    at = at < num ? at : num;
    memcpy(to, from, (size_t)at);
    for (; at + LINE <= num; at += LINE) {
        PREFETCH(from + at + PREFETCH_BYTES);
        for (int i = 0; i < LINE; i += WIDTH)
            STREAM(to + at + i, LOAD(from + at + i));
    }
#endif
    memcpy(to + at, from + at, (size_t)(num - at));
}

/* Copy `num` bytes, and digest each part of them while the first cache holds it. */
static void copy_bytes(Digest *digest, uint8_t *to, const uint8_t *from, int64_t num) {
    while (num) {
        int64_t step = num;
        if (num > CHUNK)
            step = CHUNK - (int64_t)((uintptr_t)(to + CHUNK) % LINE); /* to write a line in two parts is slow */
        copy(to, from, step);
        read_bytes(digest, from, step);
        from += step;
        to += step;
        num -= step;
    }
}

/* -- what Python calls ---------------------------------------------------------------------------------------------- */

EXPORT int64_t digest_size(void) { return sizeof(Digest); }

EXPORT void digest_begin(Digest *digest) {
    const uint64_t sums[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memset(digest, 0, sizeof *digest);
    memcpy(digest->sums, sums, sizeof sums);
}

EXPORT void digest_bytes(Digest *digest, const uint8_t *from, int64_t num) { read_bytes(digest, from, num); }

/* Digest `num` spans of (offset from `from`, length). */
EXPORT void digest_spans(Digest *digest, const uint8_t *from, const uint64_t *spans, int64_t num) {
    for (int64_t i = 0; i < num; i++)
        read_bytes(digest, from + spans[2 * i], (int64_t)spans[2 * i + 1]);
}

/* Copy `num` spans of `from` to where the spans of `to` go on: `place` is the index of a span there, and how much of it
 * is full. Stop where these end. Return how many bytes were copied. */
EXPORT int64_t copy_spans(Digest *digest, const uint8_t *from, const uint64_t *spans, int64_t num, uint8_t *to,
                          const uint64_t *targets, int64_t num_targets, int64_t *place) {
    int64_t index = place[0], full = place[1], copied = 0;
    for (int64_t i = 0; i < num; i++) {
        const uint8_t *at = from + spans[2 * i];
        int64_t left = (int64_t)spans[2 * i + 1];
        while (left) {
            while (index < num_targets && full == (int64_t)targets[2 * index + 1]) {
                index++;
                full = 0;
            }
            if (index == num_targets)
                goto end;
            int64_t room = (int64_t)targets[2 * index + 1] - full, step = left < room ? left : room;
            uint8_t *there = to + targets[2 * index] + full;
            if (digest)
                copy_bytes(digest, there, at, step);
            else
                copy(there, at, step);
            at += step;
            full += step;
            left -= step;
            copied += step;
        }
    }
end:
#if defined(STREAM)
    _mm_sfence();
#endif
    place[0] = index;
    place[1] = full;
    return copied;
}

/* Return the digest of all bytes so far, of which there are more than 240. */
EXPORT uint64_t digest_end(Digest *digest) {
    VECTOR last[VECTORS];
    uint64_t sums[LANES];
    for (int i = 0; i < VECTORS; i++)
        last[i] = LOAD((uint8_t *)digest->sums + i * WIDTH);
    take(last, digest->bytes + digest->num_waiting, SECRET_OF_LAST);
    for (int i = 0; i < VECTORS; i++)
        STORE((uint8_t *)sums + i * WIDTH, last[i]);
    uint64_t result = digest->num_bytes * PRIME64_1;
    for (int i = 0; i < LANES; i += 2) {
        __uint128_t product = (__uint128_t)(sums[i] ^ word(SECRET_OF_RESULT + 8 * i)) *
                              (sums[i + 1] ^ word(SECRET_OF_RESULT + 8 * i + 8));
        result += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    result ^= result >> 37;
    result *= 0x165667919E3779F9ULL;
    return result ^ (result >> 32);
}
