/* ---- Functions of all lanes: polynomials in float32, the C library one by one in float64 ---- */

#define SELECT(mask, x, y) ((VECTOR)(((mask) & (INTEGERS)(x)) | (~(mask) & (INTEGERS)(y))))
#define ALL(number) ((REAL)(number) - (VECTOR){0})
#define EACH(expression) \
    for (int i = 0; i < LANES; i++) \
        x[i] = expression

/* NaN stays NaN: the comparison is false, and of two numbers of which one is NaN, the instruction takes the second. */
INLINE TARGET void NAME(at_least)(VECTOR *x, REAL least)
{
    const VECTOR bound = ALL(least);
#if IS_FLOAT && LEVEL_NUMBER == 1
    *x = (VECTOR)_mm256_max_ps((__m256)bound, (__m256)*x);
#elif IS_FLOAT && LEVEL_NUMBER == 2
    *x = (VECTOR)_mm512_max_ps((__m512)bound, (__m512)*x);
#else
    *x = SELECT(*x < bound, bound, *x);
#endif
}

INLINE TARGET void NAME(at_most)(VECTOR *x, REAL most)
{
    const VECTOR bound = ALL(most);
#if IS_FLOAT && LEVEL_NUMBER == 1
    *x = (VECTOR)_mm256_min_ps((__m256)bound, (__m256)*x);
#elif IS_FLOAT && LEVEL_NUMBER == 2
    *x = (VECTOR)_mm512_min_ps((__m512)bound, (__m512)*x);
#else
    *x = SELECT(*x > bound, bound, *x);
#endif
}

INLINE TARGET void NAME(square_root)(VECTOR *x)
{
    for (int i = 0; i < LANES; i++)
        (*x)[i] = MATH(sqrt)((*x)[i]);
}

#if IS_FLOAT
/* x = n log 2 + r with |r| <= log(2) / 2, returns r; log 2 in two parts, of which n times the first is exact. The last bits
 * of `shifted` are n as an integer. */
INLINE TARGET VECTOR NAME(rest_of_log2)(VECTOR x, VECTOR *n, VECTOR *shifted)
{
    const REAL shift = 12582912; /* 1.5 * 2^23: adding it rounds to integers */
    *shifted = x * (REAL)M_LOG2E + shift;
    *n = *shifted - shift;
    return x - *n * (REAL)0.693359375 + *n * (REAL)2.12194440e-4;
}

/* (exp(r) - 1 - r - r² / 2) / r³ */
INLINE TARGET VECTOR NAME(high_terms)(VECTOR r)
{
    return 1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720 + r * (1.0f / 5040))));
}
#endif

/* exp(x) within float32's normal range, and exp(x) - 1 without loss where x is small. */
INLINE TARGET void NAME(exponential)(const VECTOR *exponent, VECTOR *power, VECTOR *power_less_one)
{
#if IS_FLOAT
    VECTOR x = *exponent, n, shifted;
    NAME(at_least)(&x, -87);
    NAME(at_most)(&x, 88);
    const VECTOR r = NAME(rest_of_log2)(x, &n, &shifted);
    const VECTOR scale = (VECTOR)((__builtin_convertvector(n, INTEGERS) + 127) << 23);
    const VECTOR rest = scale * (r + r * r * (0.5f + r * NAME(high_terms)(r)));
    *power = scale + rest;
    *power_less_one = rest + (scale - 1);
#else
    for (int i = 0; i < LANES; i++) {
        (*power)[i] = MATH(exp)((*exponent)[i]);
        (*power_less_one)[i] = MATH(expm1)((*exponent)[i]);
    }
#endif
}

/* exp(x) = (1 + rest) 2^n for x < 88, in fewer instructions than `exponential`: with AVX-512 one that multiplies by a power
 * of two, and with AVX2 for x > -88 the bits of such a power. Smaller x are taken as -87 there. */
#undef HAS_SHORT_EXPONENTIAL
#define HAS_SHORT_EXPONENTIAL (IS_FLOAT && LEVEL_NUMBER > 0)
#if HAS_SHORT_EXPONENTIAL
INLINE TARGET VECTOR NAME(rest_of_power)(VECTOR x, VECTOR *n)
{
#if LEVEL_NUMBER == 1
    NAME(at_least)(&x, -87);
#endif
    VECTOR whole, shifted;
    const VECTOR r = NAME(rest_of_log2)(x, &whole, &shifted), square = r * r;
    const VECTOR high = (0.166665188f + r * 0.0416662058f) + square * (0.00836888936f + r * 0.00139504912f);
#if LEVEL_NUMBER == 1
    *n = (VECTOR)((INTEGERS)shifted << 23);
#else
    *n = whole;
#endif
    return r + square * (0.5f + r * high);
}

INLINE TARGET VECTOR NAME(scaled)(VECTOR x, VECTOR n)
{
#if LEVEL_NUMBER == 1
    return x * (VECTOR)((INTEGERS)n + 0x3f800000); /* the bits of 1 */
#else
    return (VECTOR)_mm512_scalef_ps((__m512)x, (__m512)n);
#endif
}
#endif

/* exp(x) from 0 to infinity: the power of two in two factors, each of which is finite. */
INLINE TARGET VECTOR NAME(exp_of)(VECTOR x)
{
#if IS_FLOAT
    NAME(at_least)(&x, -104);
    NAME(at_most)(&x, 89);
    VECTOR n, shifted;
    const VECTOR r = NAME(rest_of_log2)(x, &n, &shifted);
    const INTEGERS whole = __builtin_convertvector(n, INTEGERS), half = whole >> 1;
    return (1 + (r + r * r * (0.5f + r * NAME(high_terms)(r)))) * (VECTOR)((half + 127) << 23) * (VECTOR)((whole - half + 127) << 23);
#else
    EACH(MATH(exp)(x[i]));
    return x;
#endif
}

INLINE TARGET VECTOR NAME(expm1_of)(VECTOR x)
{
#if IS_FLOAT
    VECTOR power, less_one;
    NAME(exponential)(&x, &power, &less_one);
    return SELECT(x > ALL(88), ALL(INFINITY), less_one);
#else
    EACH(MATH(expm1)(x[i]));
    return x;
#endif
}

INLINE TARGET VECTOR NAME(sigmoid_of)(VECTOR x)
{
    return 1 / (1 + NAME(exp_of)(-x));
}

INLINE TARGET VECTOR NAME(tanh_of)(VECTOR x)
{
#if IS_FLOAT
    VECTOR twice = x + x, power, less_one;
    NAME(exponential)(&twice, &power, &less_one);
    return less_one / (less_one + 2);
#else
    EACH(MATH(tanh)(x[i]));
    return x;
#endif
}

INLINE TARGET VECTOR NAME(log_of)(VECTOR x)
{
#if IS_FLOAT
    /* x = 2^n m with m in [√½, √2): log m = 2 artanh(s), s = (m - 1) / (m + 1), as a series in s. */
    const INTEGERS small = x < ALL(1.17549435e-38f);
    const VECTOR normal = SELECT(small, x * 8388608, x);
    const INTEGERS bits = (INTEGERS)normal - 0x3f3504f3; /* √½ */
    const VECTOR n = __builtin_convertvector(bits >> 23, VECTOR) - SELECT(small, ALL(23), ALL(0));
    const VECTOR m = (VECTOR)((bits & 0x7fffff) + 0x3f3504f3);
    const VECTOR s = (m - 1) / (m + 1), square = s * s;
    const VECTOR series = square * (1.0f / 3 + square * (1.0f / 5 + square * (1.0f / 7 + square * (1.0f / 9))));
    VECTOR result = n * 0.693359375f + (2 * s + (2 * s * series - n * 2.12194440e-4f));
    result = SELECT(x == ALL(INFINITY), x, result);
    result = SELECT(x == ALL(0), ALL(-INFINITY), result);
    return SELECT((x < ALL(0)) | (x != x), ALL(NAN), result);
#else
    EACH(MATH(log)(x[i]));
    return x;
#endif
}

INLINE TARGET VECTOR NAME(log1p_of)(VECTOR x)
{
#if IS_FLOAT
    const VECTOR sum = 1 + x;
    const VECTOR lost = SELECT(sum == ALL(INFINITY), ALL(0), (x - (sum - 1)) / sum);
    return SELECT(sum == ALL(0), ALL(-INFINITY), NAME(log_of)(sum) + lost);
#else
    EACH(MATH(log1p)(x[i]));
    return x;
#endif
}

/* log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), from 20 on x, as in torch. */
INLINE TARGET VECTOR NAME(softplus_of)(VECTOR x)
{
    VECTOR positive = x, size = SELECT(x < ALL(0), -x, x), power, unused;
    NAME(at_least)(&positive, 0);
    size = -size;
    NAME(exponential)(&size, &power, &unused);
    return SELECT(x > ALL(20), x, positive + NAME(log1p_of)(power));
}

/* Φ(-y) exp(y² / 2) = above / below for y from 0 to 13, where it is smooth: a ratio of polynomials fitted with a relative
 * error of 5e-9. Every coefficient is positive, so nothing cancels, in the tails neither. */
#if IS_FLOAT
INLINE TARGET void NAME(normal_tail)(VECTOR y, VECTOR *above, VECTOR *below)
{
    *above = 0.5f + y * (0.436146153f + y * (0.181645762f + y * (0.040098037f + y * 0.00403699488f)));
    *below = 1 + y * (1.67017724f + y * (1.19589591f + y * (0.465275043f + y * (0.100518083f + y * 0.0101191067f))));
}
#endif

/* x Φ(x), the exact GeLU. */
INLINE TARGET VECTOR NAME(gelu_of)(VECTOR x)
{
#if IS_FLOAT
    /* max(x, 0) - |x| Φ(-|x|) */
    VECTOR y = (VECTOR)((INTEGERS)x & INT32_MAX), power, unused, above, below; /* |x| */
    NAME(at_most)(&y, 13);
    NAME(at_least)(&x, 0);
    VECTOR square = y * y * -0.5f;
    NAME(exponential)(&square, &power, &unused);
    NAME(normal_tail)(y, &above, &below);
    return x - y * power * above / below;
#else
    EACH((REAL)0.5 * x[i] * (1 + MATH(erf)(x[i] * (REAL)M_SQRT1_2)));
    return x;
#endif
}

#define LIBRARY_FUNCTION(name) \
    INLINE TARGET VECTOR NAME(name##_of)(VECTOR x) \
    { \
        EACH(MATH(name)(x[i])); \
        return x; \
    }
LIBRARY_FUNCTION(sin)
LIBRARY_FUNCTION(cos)
LIBRARY_FUNCTION(erf)
LIBRARY_FUNCTION(floor)
LIBRARY_FUNCTION(rint)

INLINE TARGET VECTOR NAME(pow_of)(VECTOR x, REAL exponent)
{
    EACH(MATH(pow)(x[i], exponent));
    return x;
}
