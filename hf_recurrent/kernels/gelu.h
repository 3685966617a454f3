/* GeLU in training: x Φ(x), and its derivative Φ(x) + x φ(x).
 *
 * With AVX-512 in float32, Φ(-y) and Φ(-y) - y φ(y), y = |x|, are polynomials on each of 16 segments, whose coefficients
 * are the lanes of a vector: a third of the instructions of an exponential and a ratio of polynomials. They are within
 * 4e-9 and 3e-8 of the functions; from 6 on they keep their values there, 1e-9 and -4e-8. */
#ifndef GELU_SEGMENTS
#define GELU_SEGMENTS 16
#define GELU_DEGREE 5
#define GELU_END 6.0 /* of the last segment */

typedef float gelu_table[GELU_DEGREE + 1][GELU_SEGMENTS]; /* of the distance from the middle, in segments */
static gelu_table gelu_tails, gelu_slopes;

/* Polynomials through the function at Chebyshev's points of each segment; `slope`: of Φ(-y) - y φ(y), or of Φ(-y). */
static void fill_gelu_table(gelu_table table, int slope)
{
    const double width = GELU_END / GELU_SEGMENTS;
    for (int segment = 0; segment < GELU_SEGMENTS; segment++) {
        double points[GELU_DEGREE + 1], differences[GELU_DEGREE + 1], polynomial[GELU_DEGREE + 1] = {0};
        for (int i = 0; i <= GELU_DEGREE; i++) {
            points[i] = cos(M_PI * (i + 0.5) / (GELU_DEGREE + 1)) / 2;
            const double y = (segment + 0.5 + points[i]) * width, density = exp(-y * y / 2) / sqrt(2 * M_PI);
            differences[i] = erfc(y * M_SQRT1_2) / 2 - (slope ? y * density : 0);
        }
        for (int order = 1; order <= GELU_DEGREE; order++)
            for (int i = GELU_DEGREE; i >= order; i--)
                differences[i] = (differences[i] - differences[i - 1]) / (points[i] - points[i - order]);
        for (int i = GELU_DEGREE; i >= 0; i--) { /* times (t - point), plus the next difference */
            for (int power = GELU_DEGREE; power > 0; power--)
                polynomial[power] = polynomial[power - 1] - points[i] * polynomial[power];
            polynomial[0] = differences[i] - points[i] * polynomial[0];
        }
        for (int power = 0; power <= GELU_DEGREE; power++)
            table[power][segment] = (float)polynomial[power];
    }
}

__attribute__((constructor)) static void fill_gelu_tables(void)
{
    fill_gelu_table(gelu_tails, 0);
    fill_gelu_table(gelu_slopes, 1);
}
#endif

#if IS_FLOAT && LEVEL_NUMBER == 2
/* Segment and place in it of |x|, which is at most the end of the last one. */
INLINE TARGET VECTOR NAME(segment_of)(VECTOR x, VECTOR *y, __m512i *segment)
{
    const REAL shift = 12582912; /* 1.5 * 2^23: adding it rounds to integers, which are the last bits */
    *y = (VECTOR)((INTEGERS)x & INT32_MAX);
    NAME(at_most)(y, 5.99999f);
    const VECTOR place = *y * (REAL)(GELU_SEGMENTS / GELU_END) - 0.5f, shifted = place + shift;
    *segment = (__m512i)shifted;
    return place - (shifted - shift);
}

INLINE TARGET VECTOR NAME(polynomial)(gelu_table table, __m512i segment, VECTOR place)
{
    VECTOR sum = (VECTOR)_mm512_permutexvar_ps(segment, (__m512)READ(table[GELU_DEGREE]));
    UNROLL
    for (int power = GELU_DEGREE - 1; power >= 0; power--)
        sum = sum * place + (VECTOR)_mm512_permutexvar_ps(segment, (__m512)READ(table[power]));
    return sum;
}

/* max(x, 0) - |x| Φ(-|x|) */
INLINE TARGET VECTOR NAME(opened_by)(VECTOR x)
{
    __m512i segment;
    VECTOR y, place = NAME(segment_of)(x, &y, &segment);
    NAME(at_least)(&x, 0);
    return x - y * NAME(polynomial)(gelu_tails, segment, place);
}

INLINE TARGET VECTOR NAME(opened_and_slope)(VECTOR x, VECTOR *slope)
{
    __m512i segment;
    VECTOR y, place = NAME(segment_of)(x, &y, &segment);
    const VECTOR tail = NAME(polynomial)(gelu_slopes, segment, place);
    *slope = SELECT(x < ALL(0), tail, 1 - tail);
    NAME(at_least)(&x, 0);
    return x - y * NAME(polynomial)(gelu_tails, segment, place);
}
#elif IS_FLOAT
/* Φ(-|x|), for |x| up to 13, and exp(-x² / 2) */
INLINE TARGET VECTOR NAME(tail_of)(VECTOR x, VECTOR *y, VECTOR *power)
{
    VECTOR above, below;
    *y = (VECTOR)((INTEGERS)x & INT32_MAX);
    NAME(at_most)(y, 13);
    const VECTOR square = *y * *y * -0.5f;
    NAME(normal_tail)(*y, &above, &below);
#if HAS_SHORT_EXPONENTIAL
    VECTOR n, rest = NAME(rest_of_power)(square, &n);
    *power = NAME(scaled)(1 + rest, n);
    return *power * (above / below);
#else
    VECTOR unused;
    NAME(exponential)(&square, power, &unused);
    return *power * above / below;
#endif
}

/* max(x, 0) - |x| Φ(-|x|) */
INLINE TARGET VECTOR NAME(opened_by)(VECTOR x)
{
    VECTOR y, power, tail = NAME(tail_of)(x, &y, &power);
    NAME(at_least)(&x, 0);
    return x - y * tail;
}

INLINE TARGET VECTOR NAME(opened_and_slope)(VECTOR x, VECTOR *slope)
{
    VECTOR y, power, tail = NAME(tail_of)(x, &y, &power);
    *slope = SELECT(x < ALL(0), tail, 1 - tail) + x * power * 0.3989422804f;
    NAME(at_least)(&x, 0);
    return x - y * tail;
}
#else
INLINE TARGET VECTOR NAME(opened_and_slope)(VECTOR x, VECTOR *slope)
{
    VECTOR opened;
    for (int i = 0; i < LANES; i++) {
        const REAL share = (REAL)0.5 * MATH(erfc)(-x[i] * (REAL)M_SQRT1_2);
        opened[i] = x[i] * share;
        (*slope)[i] = share + x[i] * MATH(exp)(-x[i] * x[i] / 2) * (REAL)0.39894228040143267794;
    }
    return opened;
}

INLINE TARGET VECTOR NAME(opened_by)(VECTOR x)
{
    EACH(x[i] * ((REAL)0.5 * MATH(erfc)(-x[i] * (REAL)M_SQRT1_2)));
    return x;
}
#endif
