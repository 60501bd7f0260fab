/* NVFP4 packing, the arithmetic of trtspec/quant/nvfp4.py in C: same float32 operations in the same order, so the same
 * bytes. Compiled without -ffast-math and without contraction; nvfp4.py is the oracle and the fallback.
 *
 * A block is 16 values of a row. BF16 values come as uint16, E4M3 scales go out as uint8.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define BLOCK 16
#define STRIP 64 /* blocks whose intermediates stay in the first-level cache */
#define ZERO_BLOCK_SCALE 0x38

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float from_bf16(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

/* Nearest, ties to even; finite or infinite values only. */
static uint16_t to_bf16(float value) {
    uint32_t bits = to_bits(value);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* E4M3 of a float from 2^-9 to 448, nearest with ties to even. */
static uint32_t to_e4m3(float value) {
    uint32_t bits = to_bits(value);
    uint32_t normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120u << 3);
    uint32_t subnormal = to_bits(value + 16384.0f) & 0xF; /* adding 2^14 rounds to multiples of 2^-9 */
    return value < 0.015625f ? subnormal : normal;
}

/* The float of a positive E4M3 byte. */
static float from_e4m3(uint32_t code) {
    float subnormal = (float)(int32_t)code * 0.001953125f, normal = from_bits((code + (120u << 3)) << 20);
    return code < 8 ? subnormal : normal;
}

static uint32_t block_scale(float maximum, float scale_2) {
    float scale = maximum / (6.0f * scale_2);
    if (scale == 0.0f) scale = 1.0f;
    scale = scale < 0.001953125f ? 0.001953125f : scale;
    return to_e4m3(scale > 448.0f ? 448.0f : scale);
}

#if defined(__AVX2__)

/* E2M1 codes of eight quotients, as int32. Adding 2^22, 2^23 + 2 or 2^24 + 8 to |x| leaves rint(2|x|), rint(|x|) + 2 or
 * rint(|x|/2) + 4 above the sum's own bits: the code below 2, from 2 to 4, and above; the smallest is the right one. */
static __m256i e2m1x8(__m256 x) {
    __m256 a = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    __m256 fine = _mm256_add_ps(a, _mm256_set1_ps(4194304.0f));
    __m256 middle = _mm256_add_ps(a, _mm256_set1_ps(8388608.0f + 2));
    __m256 coarse = _mm256_add_ps(a, _mm256_set1_ps(16777216.0f + 8));
    __m256i code = _mm256_min_epi32(
        _mm256_sub_epi32(_mm256_castps_si256(fine), _mm256_set1_epi32(0x4A800000)),
        _mm256_sub_epi32(_mm256_castps_si256(middle), _mm256_set1_epi32(0x4B000000)));
    code = _mm256_min_epi32(code, _mm256_sub_epi32(_mm256_castps_si256(coarse), _mm256_set1_epi32(0x4B800000)));
    __m256i negative = _mm256_castps_si256(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
    code = _mm256_min_epi32(code, _mm256_set1_epi32(7));
    return _mm256_or_si256(code, _mm256_and_si256(negative, _mm256_set1_epi32(8)));
}

static __m256i divided_codes(const uint16_t *values, __m256 divisor) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)values));
    return e2m1x8(_mm256_div_ps(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)), divisor));
}

static void encode_block(const uint16_t *values, float divisor, uint8_t *packed) {
    __m256 d = _mm256_set1_ps(divisor);
    __m256i both = _mm256_packs_epi32(divided_codes(values, d), divided_codes(values + 8, d)); /* 0-3 8-11 4-7 12-15 */
    __m256i pairs = _mm256_madd_epi16(both, _mm256_set1_epi32(0x00100001)); /* low + 16 * high */
    pairs = _mm256_permute4x64_epi64(pairs, 0xD8);
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storel_epi64((__m128i *)packed, _mm_packus_epi16(words, words));
}

static uint16_t block_maximum(const uint16_t *values) {
    __m128i mask = _mm_set1_epi16(0x7FFF);
    __m128i low = _mm_and_si128(_mm_loadu_si128((const __m128i *)values), mask);
    __m128i high = _mm_and_si128(_mm_loadu_si128((const __m128i *)(values + 8)), mask);
    __m128i flipped = _mm_xor_si128(_mm_max_epu16(low, high), _mm_set1_epi16(-1));
    return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(flipped), 0);
}

#else

/* E2M1 code with the sign in bit 3; a negative value that rounds to zero keeps its sign, -0.0 has none. */
static uint32_t e2m1(float x) {
    float a = fabsf(x);
    uint32_t code =
        (uint32_t)(a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return code | ((uint32_t)(x < 0.0f) << 3);
}

static void encode_block(const uint16_t *values, float divisor, uint8_t *packed) {
    uint8_t codes[BLOCK];
    for (int i = 0; i < BLOCK; i++) codes[i] = (uint8_t)e2m1(from_bf16(values[i]) / divisor);
    for (int i = 0; i < BLOCK / 2; i++) packed[i] = (uint8_t)(codes[2 * i] | (codes[2 * i + 1] << 4));
}

static uint16_t block_maximum(const uint16_t *values) {
    uint16_t maximum = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint16_t magnitude = values[i] & 0x7FFF;
        maximum = magnitude > maximum ? magnitude : maximum;
    }
    return maximum;
}

#endif

/* The largest magnitude as BF16 bits; 0x7F80 and above mean infinity or NaN. */
uint32_t bf16_amax(const uint16_t *values, size_t count) {
    uint16_t maximum = 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t magnitude = values[i] & 0x7FFF;
        maximum = magnitude > maximum ? magnitude : maximum;
    }
    return maximum;
}

/* Fills packed (8 bytes a block) and scale (1 byte a block); returns how many blocks are zero. */
size_t bf16_pack(const uint16_t *values, size_t blocks, float scale_2, uint8_t *packed, uint8_t *scale) {
    float maxima[STRIP], divisor[STRIP];
    uint32_t codes[STRIP];
    size_t zeros = 0;
    for (size_t start = 0; start < blocks; start += STRIP) {
        size_t count = blocks - start < STRIP ? blocks - start : STRIP;
        const uint16_t *strip = values + start * BLOCK;
        for (size_t i = 0; i < count; i++) maxima[i] = from_bf16(block_maximum(strip + i * BLOCK));
        for (size_t i = count; i < STRIP; i++) maxima[i] = 1.0f;
        for (size_t i = 0; i < STRIP; i++) { /* a fixed number of 32-bit lanes, so that compilers vectorize it */
            codes[i] = block_scale(maxima[i], scale_2);
            divisor[i] = from_e4m3(codes[i]) * scale_2;
        }
        for (size_t i = 0; i < count; i++) {
            scale[start + i] = (uint8_t)codes[i];
            zeros += maxima[i] == 0.0f;
            encode_block(strip + i * BLOCK, divisor[i], packed + (start + i) * 8);
        }
    }
    return zeros;
}

/* ---- INT4, group scales in BF16: what a block becomes depends on (group scale, max|q|) alone, one table for each ---- */

#define CLASSES (1u << 20)

typedef struct {
    uint8_t codes[BLOCK]; /* of each nibble */
    uint8_t scale, pad[11];
    uint32_t generation;
} Class; /* half a cache line */

typedef struct {
    Class classes[CLASSES];
    uint32_t generation; /* classes of another scale_2 are stale, not erased */
    float scale_2;
} Tables;

size_t tables_bytes(void) { return sizeof(Tables); }

static void fill(Class *class, uint16_t scale, uint32_t largest, float scale_2) {
    float factor = from_bf16(scale), maximum = fabsf(from_bf16(to_bf16((float)largest * factor)));
    uint16_t values[BLOCK];
    uint8_t packed[BLOCK / 2];
    for (int i = 0; i < BLOCK; i++) values[i] = to_bf16((float)(i - 8) * factor);
    class->scale = (uint8_t)block_scale(maximum, scale_2);
    encode_block(values, from_e4m3(class->scale) * scale_2, packed);
    for (int i = 0; i < BLOCK; i++) class->codes[i] = i & 1 ? packed[i / 2] >> 4 : packed[i / 2] & 15;
}

#if defined(__AVX2__)

/* max|q| of each of the two blocks in 16 bytes. */
static void largest_pair(const uint8_t *source, uint32_t largest[2]) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)source), mask = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
    __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    low = _mm_abs_epi8(_mm_sub_epi8(low, eight));
    high = _mm_abs_epi8(_mm_sub_epi8(high, eight));
    __m128i most = _mm_max_epu8(low, high);
    most = _mm_max_epu8(most, _mm_srli_epi64(most, 32));
    most = _mm_max_epu8(most, _mm_srli_epi64(most, 16));
    most = _mm_max_epu8(most, _mm_srli_epi64(most, 8));
    largest[0] = (uint32_t)_mm_extract_epi8(most, 0);
    largest[1] = (uint32_t)_mm_extract_epi8(most, 8);
}

/* The codes of the two blocks in 16 bytes, each by its own table. */
static void translate_pair(const uint8_t *source, const uint8_t *first, const uint8_t *second, uint8_t *packed) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)source), mask = _mm_set1_epi8(15);
    __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    __m128i a = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)first), _mm_unpacklo_epi64(low, high));
    __m128i b = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)second), _mm_unpackhi_epi64(low, high));
    __m128i upper = _mm_slli_epi16(_mm_unpackhi_epi64(a, b), 4); /* codes of the high nibbles, below 16 */
    _mm_storeu_si128((__m128i *)packed, _mm_or_si128(_mm_unpacklo_epi64(a, b), upper));
}

#else

static void largest_pair(const uint8_t *source, uint32_t largest[2]) {
    for (int block = 0; block < 2; block++) {
        int most = 0;
        for (int i = 0; i < BLOCK / 2; i++, source++) {
            int low = abs((*source & 15) - 8), high = abs((*source >> 4) - 8);
            most = low > most ? low : most;
            most = high > most ? high : most;
        }
        largest[block] = (uint32_t)most;
    }
}

static void translate_pair(const uint8_t *source, const uint8_t *first, const uint8_t *second, uint8_t *packed) {
    for (int i = 0; i < BLOCK; i++) {
        const uint8_t *table = i < BLOCK / 2 ? first : second;
        packed[i] = (uint8_t)(table[source[i] & 15] | (table[source[i] >> 4] << 4));
    }
}

#endif

/* The largest magnitude as BF16 bits; 0x7F80 and above mean that a scale or a product is not finite. `pairs` of blocks
 * make a group. Only groups that could hold it are looked at: no code is beyond 8. */
uint32_t int4_amax(const uint8_t *packed, const uint16_t *scale, size_t groups, size_t pairs) {
    uint32_t maximum = 0;
    for (size_t group = 0; group < groups; group++) {
        if (group % STRIP == 0 && groups - group >= STRIP && /* most strips are done with one look at their scales */
            8.0f * from_bf16((uint16_t)bf16_amax(scale + group, STRIP)) <= from_bf16((uint16_t)maximum)) {
            group += STRIP - 1;
            continue;
        }
        uint32_t magnitude = scale[group] & 0x7FFF, largest = 0;
        if (magnitude >= 0x7F80) return 0x7FFF;
        float factor = from_bf16((uint16_t)magnitude);
        if (8.0f * factor <= from_bf16((uint16_t)maximum)) continue;
        for (size_t i = 0; i < pairs; i++) {
            uint32_t found[2];
            largest_pair(packed + (group * pairs + i) * BLOCK, found);
            largest = found[0] > largest ? found[0] : largest;
            largest = found[1] > largest ? found[1] : largest;
        }
        uint32_t bits = to_bf16((float)(int32_t)largest * factor);
        maximum = bits > maximum ? bits : maximum;
    }
    return maximum;
}

static const Class *class_of(Tables *tables, uint16_t group_scale, uint32_t largest) {
    Class *class = tables->classes + ((size_t)group_scale << 4) + largest;
    if (class->generation != tables->generation) {
        fill(class, group_scale, largest, tables->scale_2);
        class->generation = tables->generation;
    }
    return class;
}

size_t int4_pack(const uint8_t *source, const uint16_t *group_scale, size_t groups, size_t pairs, float scale_2,
                 Tables *tables, uint8_t *packed, uint8_t *scale) {
    size_t zeros = 0;
    if (tables->generation == 0 || to_bits(tables->scale_2) != to_bits(scale_2)) {
        tables->generation++;
        tables->scale_2 = scale_2;
    }
    for (size_t group = 0; group < groups; group++) {
        for (size_t i = 0; i < pairs; i++, source += BLOCK, packed += BLOCK, scale += 2) {
            uint32_t largest[2];
            largest_pair(source, largest);
            const Class *first = class_of(tables, group_scale[group], largest[0]);
            const Class *second = class_of(tables, group_scale[group], largest[1]);
            scale[0] = first->scale;
            scale[1] = second->scale;
            translate_pair(source, first->codes, second->codes, packed);
            zeros += (group_scale[group] & 0x7FFF) == 0 ? 2 : (largest[0] == 0) + (largest[1] == 0);
        }
    }
    return zeros;
}

/* BF16 of (code - 8) * scale, rounded once. */
void int4_decode(const uint8_t *restrict packed, const uint16_t *scale, size_t groups, size_t pairs,
                 uint16_t *restrict values) {
    for (size_t group = 0; group < groups; group++) {
        float factor = from_bf16(scale[group]);
        for (size_t block = 0; block < 2 * pairs; block++, packed += BLOCK / 2, values += BLOCK) {
            for (int i = 0; i < BLOCK; i++) {
                int code = packed[i / 2] >> (i & 1 ? 4 : 0) & 15;
                values[i] = to_bf16((float)(code - 8) * factor);
            }
        }
    }
}

/* ---- FP8 E4M3 with a float32 scale for `width` columns of these rows, to BF16 ---- */

void fp8_decode(const uint8_t *codes, const float *scale, size_t rows, size_t columns, size_t width, uint16_t *values) {
    for (size_t row = 0; row < rows; row++) {
        for (size_t start = 0; start < columns; start += width) {
            float factor = scale[start / width];
            size_t end = start + width < columns ? start + width : columns;
            for (size_t i = row * columns + start; i < row * columns + end; i++) {
                uint32_t sign = (uint32_t)(codes[i] & 0x80) << 24;
                float value = from_bits(to_bits(from_e4m3(codes[i] & 0x7F)) | sign) * factor;
                uint16_t bits = to_bf16(value);
                values[i] = (codes[i] & 0x7F) == 0x7F || value != value ? 0x7FC0 : bits;
            }
        }
    }
}

/* ---- block scales of least squared error: quant/nvfp4.py, with its arithmetic to the last bit ---- */

#define ABOVE 11 /* codes above the scale of the maximum: beyond them the maximum would round to 2 or less */
#define BELOW 4  /* and below it; further ones only where clipping the maximum alone would not lose already */
#define LANES (ABOVE + 1 + BELOW)

/* One float or integer for each of eight candidates: an octave of E4M3. */
#define OCTAVE 8
typedef float Floats __attribute__((vector_size(4 * OCTAVE)));
typedef int32_t Integers __attribute__((vector_size(4 * OCTAVE)));

/* Nearest E2M1 value of magnitudes: adding 2^22 times the power of two below y, at least 1, leaves one bit behind the
 * leading one, and multiples of 0.5 below 1. */
static inline Floats round_to_e2m1(Floats y) {
    Integers exponent = (Integers)y & 0x7F800000, small = exponent < 0x3F800000;
    Floats magic = (Floats)(((exponent & ~small) | (0x3F800000 & small)) + (22 << 23));
    Floats rounded = (y + magic) - magic, six = {6, 6, 6, 6, 6, 6, 6, 6};
    Integers inside = rounded <= six; /* not so for NaN either, from quotients beyond 2^105 */
    return (Floats)(((Integers)rounded & inside) | ((Integers)six & ~inside));
}

static inline Floats squared_errors(float magnitude, Floats quotient, Floats divisor) {
    Floats error = magnitude - round_to_e2m1(quotient) * divisor;
    return error * error;
}

/* Divisors of all codes under a `unit`; a code beyond E4M3's has the nearest one's. */
typedef struct {
    float below[LANES], code[0x7F + LANES];
} Divisors;

static void fill_divisors(Divisors *all, float unit) {
    for (int i = 0; i < LANES; i++) all->below[i] = from_e4m3(1) * unit;
    for (int i = 0; i < 0x7F + LANES; i++) all->code[i] = from_e4m3((uint32_t)(i < 1 ? 1 : i > 0x7E ? 0x7E : i)) * unit;
}

static inline Floats divisors_from(const Divisors *all, int first) {
    Floats result;
    memcpy(&result, all->below + LANES + first, sizeof result); /* `code` follows `below` */
    return result;
}

/* Squared errors of the magnitudes (value i is added to value i + 8 first) under the candidates from `first` on. From
 * the first normal code on the second octave is twice the first, its quotients the half, exactly: no second division.
 * (Not so of codes beyond the last, which nobody asks for.) */
#if defined(__AVX512F__) && defined(__AVX512DQ__)

static inline __m512 squared_errors16(__m512 x, __m512 quotient, __m512 divisor) {
    __m512i exponent = _mm512_and_si512(_mm512_castps_si512(quotient), _mm512_set1_epi32(0x7F800000));
    exponent = _mm512_max_epi32(exponent, _mm512_set1_epi32(0x3F800000));
    __m512 magic = _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(22 << 23)));
    __m512 rounded = _mm512_sub_ps(_mm512_add_ps(quotient, magic), magic);
    rounded = _mm512_min_ps(rounded, _mm512_set1_ps(6.0f)); /* the second one where the first is NaN */
    __m512 error = _mm512_sub_ps(x, _mm512_mul_ps(rounded, divisor));
    return _mm512_mul_ps(error, error);
}

static inline __m512 both_octaves(float magnitude, __m256 low) {
    __m256 quotient = _mm256_div_ps(_mm256_set1_ps(magnitude), low);
    return _mm512_insertf32x8(_mm512_castps256_ps512(quotient), _mm256_mul_ps(quotient, _mm256_set1_ps(0.5f)), 1);
}

static inline void candidate_errors(const float *magnitudes, int first, const Divisors *all, float *errors) {
    __m512 divisor = _mm512_loadu_ps(all->below + LANES + first), sum = _mm512_setzero_ps();
    __m256 low = _mm512_castps512_ps256(divisor);
    if (first >= 8) {
        for (int i = 0; i < BLOCK / 2; i++) {
            float a = magnitudes[i], b = magnitudes[i + BLOCK / 2];
            __m512 ea = squared_errors16(_mm512_set1_ps(a), both_octaves(a, low), divisor);
            sum = _mm512_add_ps(sum, _mm512_add_ps(ea, squared_errors16(_mm512_set1_ps(b), both_octaves(b, low), divisor)));
        }
    } else {
        for (int i = 0; i < BLOCK / 2; i++) {
            __m512 a = _mm512_set1_ps(magnitudes[i]), b = _mm512_set1_ps(magnitudes[i + BLOCK / 2]);
            __m512 ea = squared_errors16(a, _mm512_div_ps(a, divisor), divisor);
            sum = _mm512_add_ps(sum, _mm512_add_ps(ea, squared_errors16(b, _mm512_div_ps(b, divisor), divisor)));
        }
    }
    _mm512_storeu_ps(errors, sum);
}

#else

static inline void candidate_errors(const float *magnitudes, int first, const Divisors *all, float *errors) {
    Floats low = divisors_from(all, first), high = divisors_from(all, first + OCTAVE), sums[2] = {{0}, {0}};
    for (int i = 0; i < BLOCK / 2; i++) {
        float a = magnitudes[i], b = magnitudes[i + BLOCK / 2];
        Floats qa = a / low, qb = b / low;
        sums[0] += squared_errors(a, qa, low) + squared_errors(b, qb, low);
        if (first >= 8)
            sums[1] += squared_errors(a, qa * 0.5f, high) + squared_errors(b, qb * 0.5f, high);
        else
            sums[1] += squared_errors(a, a / high, high) + squared_errors(b, b / high, high);
    }
    memcpy(errors, sums, sizeof sums);
}

#endif

/* The first lane of least error whose code is one of E4M3's. */
static inline int least_lane(const float *errors, int first, float *least) {
    int found = first < 1 ? 1 - first : 0, end = first + LANES > 0x7F ? 0x7F - first : LANES;
#if defined(__AVX512F__)
    __m512 all = _mm512_loadu_ps(errors);
    __mmask16 valid = (__mmask16)((1u << end) - (1u << found));
    *least = _mm512_mask_reduce_min_ps(valid, all);
    uint32_t equal = _mm512_mask_cmp_ps_mask(valid, all, _mm512_set1_ps(*least), _CMP_EQ_OQ);
    return equal ? __builtin_ctz(equal) : found;
#else
    *least = INFINITY;
    for (int lane = found; lane < end; lane++) {
        if (errors[lane] < *least) {
            *least = errors[lane];
            found = lane;
        }
    }
    return found;
#endif
}

/* What clipping the maximum alone costs under the scale below code `first`: no lower one is better once that is more
 * than the least error found. Infinite where there is no lower one. */
static inline float clipping_error(int first, float maximum, const Divisors *all) {
    float clipped = maximum - 6.0f * all->code[first > 1 ? first - 1 : 1];
    if (first <= 1) return INFINITY;
    return clipped > 0.0f ? clipped * clipped : 0.0f; /* a block that vanishes beside a large one is not clipped */
}

/* The E4M3 scale of least squared error, the smallest of equal ones. */
static uint8_t best_scale(const float *magnitudes, float maximum, float scale_2, const Divisors *all) {
    int base = (int)block_scale(maximum, scale_2), best = 1;
    float errors[LANES], least = INFINITY, error;
    for (int first = base > BELOW ? base - BELOW : 1;; first -= LANES) {
        candidate_errors(magnitudes, first, all, errors);
        int found = first + least_lane(errors, first, &error);
        if (error <= least) {
            least = error;
            best = found;
        }
        if (first <= 1 || clipping_error(first, maximum, all) > least) return (uint8_t)best;
    }
}

/* `unit` is what a scale of 1.0 stands for while scales are searched; 0 for a tensor of zeros, whose scales stay 1.0. */
static uint8_t zero_scale(float unit) { return unit != 0.0f ? 1 : ZERO_BLOCK_SCALE; }

size_t bf16_pack_mse(const uint16_t *values, size_t blocks, float scale_2, float unit, uint8_t *packed,
                     uint8_t *scale) {
    size_t zeros = 0;
    Divisors all;
    fill_divisors(&all, unit);
    for (size_t i = 0; i < blocks; i++) {
        const uint16_t *block = values + i * BLOCK;
        float maximum = from_bf16(block_maximum(block)), magnitudes[BLOCK];
        for (int j = 0; j < BLOCK; j++) magnitudes[j] = from_bf16(block[j] & 0x7FFF);
        scale[i] = maximum != 0.0f ? best_scale(magnitudes, maximum, scale_2, &all) : zero_scale(unit);
        encode_block(block, from_e4m3(scale[i]) * scale_2, packed + i * 8);
        zeros += maximum == 0.0f;
    }
    return zeros;
}

/* A block of INT4 has nine magnitudes at most, and its candidates depend on (group scale, max|q|) alone: their errors
 * are computed once for each such class, and a block only adds up sixteen of them. */

#define SEARCHES 4096 /* classes that are kept, one for each hash */

typedef struct {
    float errors[9][LANES];      /* of 0 to 8 times the group scale */
    uint8_t codes[LANES][BLOCK]; /* of each nibble under each candidate, where `known` says so */
    uint32_t key, generation, known;
    int32_t first;
    float maximum, clipping;
} Search;

typedef struct {
    Search searches[SEARCHES];
    Divisors divisors;
    uint32_t generation;
    float scale_2, unit;
} Searches;

size_t searches_bytes(void) { return sizeof(Searches); }

static void begin_search(Search *search, uint16_t group_scale, uint32_t largest, const Searches *all) {
    float factor = from_bf16(group_scale);
    search->maximum = fabsf(from_bf16(to_bf16((float)largest * factor)));
    int base = (int)block_scale(search->maximum, all->scale_2);
    search->first = base > BELOW ? base - BELOW : 1;
    search->known = 0;
    search->clipping = clipping_error(search->first, search->maximum, &all->divisors);
    for (int q = 0; q < 9; q++) {
        float magnitude = fabsf(from_bf16(to_bf16((float)q * factor)));
        for (int octave = 0; octave < LANES; octave += OCTAVE) {
            Floats divisor = divisors_from(&all->divisors, search->first + octave);
            Floats errors = squared_errors(magnitude, magnitude / divisor, divisor);
            memcpy(search->errors[q] + octave, &errors, sizeof errors);
        }
    }
}

/* The codes of the sixteen nibbles under a scale. */
static void nibble_codes(uint16_t group_scale, uint8_t scale, float scale_2, uint8_t *codes) {
    uint16_t values[BLOCK];
    uint8_t packed[BLOCK / 2];
    for (int i = 0; i < BLOCK; i++) values[i] = to_bf16((float)(i - 8) * from_bf16(group_scale));
    encode_block(values, from_e4m3(scale) * scale_2, packed);
    for (int i = 0; i < BLOCK; i++) codes[i] = i & 1 ? packed[i / 2] >> 4 : packed[i / 2] & 15;
}

/* |q| of the values of a block. */
static inline void code_magnitudes(const uint8_t *source, uint8_t *q) {
#if defined(__AVX2__)
    __m128i bytes = _mm_loadl_epi64((const __m128i *)source), mask = _mm_set1_epi8(15);
    __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
    _mm_storeu_si128((__m128i *)q, _mm_abs_epi8(_mm_sub_epi8(codes, _mm_set1_epi8(8))));
#else
    for (int i = 0; i < BLOCK; i++) q[i] = (uint8_t)abs((source[i / 2] >> (i & 1 ? 4 : 0) & 15) - 8);
#endif
}

/* What `candidate_errors` gives for the block. */
static inline void add_errors(const Search *search, const uint8_t *q, float *sums) {
#if defined(__AVX512F__)
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < BLOCK / 2; i++) {
        __m512 low = _mm512_loadu_ps(search->errors[q[i]]), high = _mm512_loadu_ps(search->errors[q[i + BLOCK / 2]]);
        sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
    }
    _mm512_storeu_ps(sums, sum);
#else
    memset(sums, 0, LANES * sizeof *sums);
    for (int i = 0; i < BLOCK / 2; i++) {
        const float *low = search->errors[q[i]], *high = search->errors[q[i + BLOCK / 2]];
        for (int lane = 0; lane < LANES; lane++) sums[lane] += low[lane] + high[lane];
    }
#endif
}

/* The scale of a block and the codes of its nibbles; `spare` takes codes that no class keeps. */
static const uint8_t *search_block(const uint8_t *source, uint16_t group_scale, uint32_t largest, Searches *all,
                                   uint8_t *scale, uint8_t *spare) {
    uint32_t key = ((uint32_t)group_scale << 4) | largest;
    Search *search = all->searches + ((key * 2654435761u) >> 20);
    if (search->key != key || search->generation != all->generation) {
        begin_search(search, group_scale, largest, all);
        search->key = key;
        search->generation = all->generation;
    }
    if (search->maximum == 0.0f) {
        *scale = zero_scale(all->unit);
        memset(spare, 0, BLOCK);
        return spare;
    }
    uint8_t q[BLOCK];
    float sums[LANES], least;
    code_magnitudes(source, q);
    add_errors(search, q, sums);
    int lane = least_lane(sums, search->first, &least);
    if (search->first <= 1 || search->clipping > least) {
        *scale = (uint8_t)(search->first + lane);
        if (!(search->known >> lane & 1)) {
            nibble_codes(group_scale, *scale, all->scale_2, search->codes[lane]);
            search->known |= 1u << lane;
        }
        return search->codes[lane];
    }
    float magnitudes[BLOCK];
    for (int i = 0; i < BLOCK; i++) magnitudes[i] = fabsf(from_bf16(to_bf16((float)q[i] * from_bf16(group_scale))));
    *scale = best_scale(magnitudes, search->maximum, all->scale_2, &all->divisors);
    nibble_codes(group_scale, *scale, all->scale_2, spare);
    return spare;
}

size_t int4_pack_mse(const uint8_t *source, const uint16_t *group_scale, size_t groups, size_t pairs, float scale_2,
                     float unit, Searches *all, uint8_t *packed, uint8_t *scale) {
    size_t zeros = 0;
    if (all->generation == 0 || to_bits(all->scale_2) != to_bits(scale_2) || to_bits(all->unit) != to_bits(unit)) {
        all->generation++;
        all->scale_2 = scale_2;
        all->unit = unit;
        fill_divisors(&all->divisors, unit);
    }
    for (size_t group = 0; group < groups; group++) {
        for (size_t i = 0; i < pairs; i++, source += BLOCK, packed += BLOCK, scale += 2) {
            uint32_t largest[2];
            uint8_t spare[2][BLOCK];
            largest_pair(source, largest);
            const uint8_t *first = search_block(source, group_scale[group], largest[0], all, scale, spare[0]);
            uint8_t kept[BLOCK]; /* the second block may take the first one's place */
            memcpy(kept, first, BLOCK);
            const uint8_t *second =
                search_block(source + BLOCK / 2, group_scale[group], largest[1], all, scale + 1, spare[1]);
            translate_pair(source, kept, second, packed);
            zeros += (group_scale[group] & 0x7FFF) == 0 ? 2 : (largest[0] == 0) + (largest[1] == 0);
        }
    }
    return zeros;
}

/* ---- what it cost: sums[0] += squared error, sums[1] += squared value ---- */

void error_sums(const uint16_t *values, const uint8_t *packed, const uint8_t *scale, size_t blocks, float scale_2,
                double *sums) {
    static const float table[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, -.5f, -1, -1.5f, -2, -3, -4, -6};
    for (size_t start = 0; start < blocks; start += STRIP) {
        float error[BLOCK] = {0}, norm[BLOCK] = {0}; /* by place in the block, whatever the width of registers */
        for (size_t i = start; i < blocks && i < start + STRIP; i++) {
            float factor = from_e4m3(scale[i]) * scale_2, codes[BLOCK];
#if defined(__AVX512F__)
            __m128i bytes = _mm_loadl_epi64((const __m128i *)(packed + i * 8)), mask = _mm_set1_epi8(15);
            __m128i nibbles = _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
            _mm512_storeu_ps(codes, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(nibbles), _mm512_loadu_ps(table)));
#else
            for (int j = 0; j < BLOCK; j++) codes[j] = table[packed[i * 8 + j / 2] >> (j & 1 ? 4 : 0) & 15];
#endif
            for (int j = 0; j < BLOCK; j++) {
                float value = from_bf16(values[i * BLOCK + j]), difference = codes[j] * factor - value;
                error[j] += difference * difference;
                norm[j] += value * value;
            }
        }
        for (int j = 0; j < BLOCK; j++) {
            sums[0] += error[j];
            sums[1] += norm[j];
        }
    }
}
