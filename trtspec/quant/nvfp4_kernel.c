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
void int4_decode(const uint8_t *packed, const uint16_t *scale, size_t groups, size_t pairs, uint16_t *values) {
    for (size_t group = 0; group < groups; group++) {
        float factor = from_bf16(scale[group]);
        for (size_t i = 0; i < pairs * 2 * BLOCK; i += 2) {
            *values++ = to_bf16((float)((*packed & 15) - 8) * factor);
            *values++ = to_bf16((float)((*packed++ >> 4) - 8) * factor);
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

/* ---- block scales of least squared error ---- */

#define ABOVE 11 /* codes above the scale of the maximum: beyond them the maximum would round to 2 or less */
#define BELOW 4  /* and below it; further ones only where clipping the maximum alone would not lose already */
#define LANES (ABOVE + 1 + BELOW)

/* Squared errors of a block for candidates with these divisors; each sum runs over the values in order. */
#if defined(__AVX2__)

static __m256 round_to_e2m1(__m256 y) {
    __m256 two22 = _mm256_set1_ps(4194304.0f), two23 = _mm256_set1_ps(8388608.0f), two24 = _mm256_set1_ps(16777216.0f);
    __m256 fine = _mm256_sub_ps(_mm256_add_ps(y, two22), two22);
    __m256 middle = _mm256_sub_ps(_mm256_add_ps(y, two23), two23);
    __m256 coarse = _mm256_min_ps(_mm256_sub_ps(_mm256_add_ps(y, two24), two24), _mm256_set1_ps(6.0f));
    __m256 above = _mm256_blendv_ps(coarse, middle, _mm256_cmp_ps(y, _mm256_set1_ps(4.0f), _CMP_LT_OQ));
    return _mm256_blendv_ps(above, fine, _mm256_cmp_ps(y, _mm256_set1_ps(2.0f), _CMP_LT_OQ));
}

static void candidate_errors(const float *magnitudes, const float *divisor, float *errors) {
    for (int lane = 0; lane < LANES; lane += 8) {
        __m256 d = _mm256_loadu_ps(divisor + lane), sum = _mm256_setzero_ps();
        __m256 inverse = _mm256_div_ps(_mm256_set1_ps(1.0f), d);
        for (int i = 0; i < BLOCK; i++) {
            __m256 y = _mm256_mul_ps(_mm256_set1_ps(magnitudes[i]), inverse);
            __m256 error = _mm256_sub_ps(y, round_to_e2m1(y));
            sum = _mm256_add_ps(sum, _mm256_mul_ps(error, error));
        }
        _mm256_storeu_ps(errors + lane, _mm256_mul_ps(sum, _mm256_mul_ps(d, d)));
    }
}

#else

static float round_to_e2m1(float y) {
    float fine = (y + 4194304.0f) - 4194304.0f, middle = (y + 8388608.0f) - 8388608.0f;
    float coarse = (y + 16777216.0f) - 16777216.0f;
    return y < 2.0f ? fine : y < 4.0f ? middle : coarse < 6.0f ? coarse : 6.0f;
}

static void candidate_errors(const float *magnitudes, const float *divisor, float *errors) {
    for (int lane = 0; lane < LANES; lane++) {
        float inverse = 1.0f / divisor[lane], sum = 0.0f;
        for (int i = 0; i < BLOCK; i++) {
            float y = magnitudes[i] * inverse, error = y - round_to_e2m1(y);
            sum += error * error;
        }
        errors[lane] = sum * (divisor[lane] * divisor[lane]);
    }
}

#endif

/* The E4M3 scale of least squared error; of equal ones the maximum's own, then the first from below. */
static uint8_t best_scale(const float *magnitudes, float maximum, float scale_2) {
    float divisor[LANES], errors[LANES];
    int base = (int)block_scale(maximum, scale_2), best = base;
    float least = INFINITY;
    for (int first = base - BELOW;; first -= LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            int code = first + lane;
            divisor[lane] = from_e4m3((uint8_t)(code < 1 ? 1 : code > 0x7E ? 0x7E : code)) * scale_2;
        }
        candidate_errors(magnitudes, divisor, errors);
        if (first == base - BELOW) least = errors[BELOW];
        for (int lane = 0; lane < LANES; lane++) {
            int code = first + lane;
            if (code >= 1 && code <= 0x7E && errors[lane] < least) {
                least = errors[lane];
                best = code;
            }
        }
        float clipped = maximum - 6.0f * (from_e4m3((uint8_t)(first > 1 ? first - 1 : 1)) * scale_2);
        if (first <= 1 || clipped * clipped > least) return (uint8_t)best;
    }
}

size_t bf16_pack_mse(const uint16_t *values, size_t blocks, float scale_2, uint8_t *packed, uint8_t *scale) {
    size_t zeros = 0;
    for (size_t i = 0; i < blocks; i++) {
        const uint16_t *block = values + i * BLOCK;
        float maximum = from_bf16(block_maximum(block)), magnitudes[BLOCK];
        for (int j = 0; j < BLOCK; j++) magnitudes[j] = from_bf16(block[j] & 0x7FFF);
        scale[i] = maximum == 0.0f ? ZERO_BLOCK_SCALE : best_scale(magnitudes, maximum, scale_2);
        encode_block(block, from_e4m3(scale[i]) * scale_2, packed + i * 8);
        zeros += maximum == 0.0f;
    }
    return zeros;
}

/* ---- what it cost: sums[0] += squared error, sums[1] += squared value ---- */

void error_sums(const uint16_t *values, const uint8_t *packed, const uint8_t *scale, size_t blocks, float scale_2,
                double *sums) {
    static const float table[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, -.5f, -1, -1.5f, -2, -3, -4, -6};
    for (size_t i = 0; i < blocks; i++) {
        float factor = from_e4m3(scale[i]) * scale_2, error = 0.0f, norm = 0.0f;
        for (int j = 0; j < BLOCK; j++) {
            float value = from_bf16(values[i * BLOCK + j]);
            float difference = table[packed[i * 8 + j / 2] >> (j & 1 ? 4 : 0) & 15] * factor - value;
            error += difference * difference;
            norm += value * value;
        }
        sums[0] += error;
        sums[1] += norm;
    }
}
