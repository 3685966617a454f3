/* Range coder of bits with given probabilities: integers only, so that every machine writes and reads the same code.
 *
 * Martin, "Range encoding" (1979), for two symbols, with carries. `tests/compression/reference_coder.py` is the same in
 * plain Python.
 */
struct coder {
    uint32_t low, range; /* of a decoder, low is the code's distance from the lower end */
    int64_t used, size;  /* bytes of code: written or read, and their room or number */
    uint8_t *bytes;
};
enum { LEAST_RANGE = 1 << 24 };

INLINE void add_low(struct coder *c, uint32_t amount)
{
    c->low += amount;
    if (c->low < amount) /* carry */
        for (int64_t i = c->used < c->size ? c->used : c->size; i-- > 0 && ++c->bytes[i] == 0;) ;
}
INLINE void put_code(struct coder *c)
{
    if (c->used < c->size) c->bytes[c->used] = (uint8_t)(c->low >> 24);
    c->used++;
}
/* Zeros follow the end of the code. */
INLINE uint32_t next_code(struct coder *c) { return c->used < c->size ? c->bytes[c->used++] : 0; }

/* Encode `bit`, or decode a bit and return it. one: 65536 times the probability of a one, from 1 to 65535. */
INLINE int code_bit(struct coder *c, int decodes, int bit, uint32_t one)
{
    const uint32_t bound = (uint32_t)((uint64_t)c->range * one >> 16);
    if (decodes) bit = c->low < bound;
    if (bit) c->range = bound;
    else {
        if (decodes) c->low -= bound;
        else add_low(c, bound);
        c->range -= bound;
    }
    while (c->range < LEAST_RANGE) {
        if (!decodes) put_code(c);
        c->low = c->low << 8 | (decodes ? next_code(c) : 0);
        c->range <<= 8;
    }
    return bit;
}
static void begin_coder(struct coder *c, int decodes)
{
    c->low = c->used = 0;
    c->range = UINT32_MAX;
    for (int i = 0; decodes && i < 4; i++) c->low = c->low << 8 | next_code(c);
}
/* The shortest code that decodes to the bits: zeros at its end need not be written. */
static void finish_coder(struct coder *c)
{
    add_low(c, (0u - c->low) & (LEAST_RANGE - 1));
    put_code(c);
    if (c->used <= c->size) while (c->used && !c->bytes[c->used - 1]) c->used--;
}
/* exp of x <= 0, not below exp(-40); relative error 2e-6. */
INLINE float exp_negative(float x)
{
    const float y = clipped(x, -40, 0) * 1.4426950408889634f;
    const int k = (int)y;
    const float f = y - (float)k;
    float p = 0.00010938752529909834f;
    p = p * f + 0.0012757162330672145f; p = p * f + 0.009580058045685291f; p = p * f + 0.05549103394150734f;
    p = p * f + 0.24022436141967773f; p = p * f + 0.6931470632553101f; p = p * f + 1.0f;
    const union { int32_t i; float f; } scale = {(k + 127) << 23};
    return p * scale.f;
}
