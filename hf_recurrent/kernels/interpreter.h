/* One version of the kernel: the body that versions.h includes. */
#include "vectors.h"

/* The memory of operands. */
INLINE TARGET REAL *NAME(at)(const struct operand *x, int64_t streams, void *const *bases)
{
    return x->base < 0 ? 0 : (REAL *)bases[x->base] + x->scaled * streams + x->offset;
}
#define ROW(x, stream) (NAME(at)(&(x), streams, bases) + (stream) * (x).stride)

#include "linear.h"
#include "vector_functions.h"
#include "map.h"
#include "rows.h"
#include "matmul.h"
#include "adagrad.h"
#include "gradients.h"
#include "recurrences.h"

#define EACH_STREAM for (int64_t stream = first; stream < first + count; stream++)
#define OF_STREAMS int64_t streams, int64_t first, int64_t count, void *const *bases

/* ---- Instructions of streams ---- */

INLINE TARGET void NAME(run_norm)(const struct norm *one, OF_STREAMS)
{
    EACH_STREAM
        for (int64_t row = 0; row < one->count; row++)
            NAME(norm)(
                one->width, one->center, ROW(one->to, stream) + row * one->width,
                ROW(one->x, stream) + row * one->width, NAME(at)(&one->weight, streams, bases),
                NAME(at)(&one->bias, streams, bases), (REAL)one->eps);
}

INLINE TARGET void NAME(run_embedding)(const struct embedding *one, OF_STREAMS)
{
    const int64_t *ids = (const int64_t *)bases[one->ids.base];
    EACH_STREAM
        NAME(embedding)(
            one, bases[one->table.base], NAME(at)(&one->scale, streams, bases), ids[stream],
            ROW(one->to, stream));
}

INLINE TARGET void NAME(run_token)(const struct token *one, OF_STREAMS)
{
    const int64_t *ids = (const int64_t *)bases[one->ids.base];
    EACH_STREAM
        *ROW(one->to, stream) = (REAL)ids[stream];
}

INLINE TARGET void NAME(run_ngrams)(const struct ngrams *one, OF_STREAMS)
{
    EACH_STREAM
        NAME(ngrams)(
            one, bases[one->table.base], NAME(at)(&one->scale, streams, bases), bases[one->factors.base],
            bases[one->lengths.base], ROW(one->windows, stream), ROW(one->to, stream));
}

INLINE TARGET void NAME(run_copy)(const struct copy *one, OF_STREAMS)
{
    EACH_STREAM
        memcpy(ROW(one->to, stream), ROW(one->x, stream), one->width * sizeof(REAL));
}

INLINE TARGET void NAME(run_gather)(const struct gather *one, OF_STREAMS)
{
    const int32_t *index = bases[one->index.base];
    const int32_t *offsets = one->to_index.base < 0 ? 0 : bases[one->to_index.base];
    EACH_STREAM {
        const REAL *x = ROW(one->x, stream);
        REAL *to = ROW(one->to, stream);
        if (one->run == 1)
            for (int64_t i = 0; i < one->width; i++)
                to[offsets ? offsets[i] : i] = x[index[i]];
        else
            for (int64_t i = 0; i < one->width; i++)
                memcpy(to + (offsets ? offsets[i] : i * one->run), x + index[i], one->run * sizeof(REAL));
    }
}

INLINE TARGET void NAME(run_reduce)(const struct reduce *one, OF_STREAMS)
{
    EACH_STREAM
        NAME(reduce)(one, ROW(one->x, stream), ROW(one->to, stream));
}

INLINE TARGET void NAME(run_softmax)(const struct softmax *one, OF_STREAMS)
{
    EACH_STREAM
        for (int64_t row = 0; row < one->rows; row++)
            NAME(softmax)(
                one->width, ROW(one->to, stream) + row * one->width, ROW(one->x, stream) + row * one->width);
}

INLINE TARGET void NAME(run_attention)(const struct attention *one, OF_STREAMS)
{
    EACH_STREAM
        NAME(attention)(
            one, ROW(one->q, stream), ROW(one->k, stream), ROW(one->v, stream),
            NAME(at)(&one->mask, streams, bases), ROW(one->scores, stream), ROW(one->to, stream));
}

INLINE TARGET void NAME(run_product)(const struct product *one, OF_STREAMS)
{
    EACH_STREAM
        NAME(product)(one, ROW(one->a, stream), ROW(one->b, stream), ROW(one->to, stream));
}

#if IS_FLOAT
INLINE TARGET void NAME(run_quantize)(const struct quantize *one, OF_STREAMS)
{
    int16_t *to = (int16_t *)NAME(at)(&one->to, streams, bases);
    EACH_STREAM
        for (int64_t row = 0; row < one->count; row++) {
            const int64_t at = stream * one->count + row;
            NAME(quantize)(
                one->width, ROW(one->x, stream) + row * one->width, to + at * one->width,
                NAME(at)(&one->scale, streams, bases) + at);
        }
}
#endif

/* ---- Instructions of blocks ---- */

INLINE TARGET void NAME(run_broadcast)(const struct broadcast *one, void *const *bases)
{
    const REAL *x = AT_ONE(x);
    REAL *to = AT_ONE(to);
    for (int64_t o = 0; o < one->outer; o++, x += one->inner)
        for (int64_t c = 0; c < one->count; c++, to += one->inner) {
            if (one->inner == 1)
                *to = *x;
            else
                memcpy(to, x, one->inner * sizeof(REAL));
        }
}

INLINE TARGET void NAME(run_nll_loss)(const struct nll_loss *one, void *const *bases)
{
    const REAL *x = AT_ONE(x), *labels = AT_ONE(labels);
    REAL *to = AT_ONE(to);
    for (int64_t t = 0; t < one->steps; t++)
        to[t] = labels[t] < 0 ? 0 : -x[t * one->width + (int64_t)labels[t]];
}

INLINE TARGET void NAME(run_nll_loss_backward)(const struct nll_loss *one, void *const *bases)
{
    const REAL *grad = AT_ONE(x), *labels = AT_ONE(labels);
    REAL *to = AT_ONE(to);
    memset(to, 0, one->steps * one->width * sizeof(REAL));
    for (int64_t t = 0; t < one->steps; t++)
        if (labels[t] >= 0)
            to[t * one->width + (int64_t)labels[t]] = -grad[one->one_grad ? 0 : t];
}

INLINE TARGET void NAME(run_lookup)(const struct lookup *one, void *const *bases)
{
    const REAL *x = AT_ONE(x), *ids = AT_ONE(ids);
    for (int64_t t = 0; t < one->steps; t++)
        memcpy(AT_ONE(to) + t * one->width, x + (int64_t)ids[t] * one->width, one->width * sizeof(REAL));
}

INLINE TARGET void NAME(run_lookup_backward)(const struct lookup *one, void *const *bases)
{
    const REAL *x = AT_ONE(x), *ids = AT_ONE(ids);
    REAL *to = AT_ONE(to);
    memset(to, 0, one->height * one->width * sizeof(REAL));
    for (int64_t t = 0; t < one->steps; t++)
        for (int64_t i = 0; i < one->width; i++)
            to[(int64_t)ids[t] * one->width + i] += x[t * one->width + i];
}

/* Runs a segment on the streams from `first` on; returns an outcome. */
TARGET static int64_t NAME(run)(
    int64_t streams, int64_t first, int64_t count, const int64_t *code, const int64_t *end, void *const *bases)
{
    for (; code < end; code += code[1]) {
        const void *fields = code + 2;
        switch ((enum opcode)code[0]) {
        case LINEAR: NAME(linear)(fields, streams, first, count, bases); break;
        case NORM: NAME(run_norm)(fields, streams, first, count, bases); break;
        case EMBEDDING: NAME(run_embedding)(fields, streams, first, count, bases); break;
        case TOKEN: NAME(run_token)(fields, streams, first, count, bases); break;
        case NGRAMS: NAME(run_ngrams)(fields, streams, first, count, bases); break;
        case COPY: NAME(run_copy)(fields, streams, first, count, bases); break;
        case GATHER: NAME(run_gather)(fields, streams, first, count, bases); break;
        case MAP: NAME(map)(fields, streams, first, count, bases); break;
        case REDUCE: NAME(run_reduce)(fields, streams, first, count, bases); break;
        case SOFTMAX: NAME(run_softmax)(fields, streams, first, count, bases); break;
        case ATTENTION: NAME(run_attention)(fields, streams, first, count, bases); break;
        case PRODUCT: NAME(run_product)(fields, streams, first, count, bases); break;
#if IS_FLOAT
        case QUANTIZE: NAME(run_quantize)(fields, streams, first, count, bases); break;
#else
        case QUANTIZE: break;
#endif
        case UNCHANGED: {
            const struct unchanged *one = fields;
            if (first == 0 && memcmp(bases[one->a.base], bases[one->b.base], one->bytes))
                return CHANGED;
            break;
        }
        case MATMUL: NAME(matmul)(fields, bases); break;
        case BROADCAST: NAME(run_broadcast)(fields, bases); break;
        case SCAN: NAME(scan)(fields, bases); break;
        case SCAN_BACKWARD: NAME(scan_backward)(fields, bases); break;
        case NORM_BACKWARD: NAME(norm_backward)(fields, bases); break;
        case NLL_LOSS: NAME(run_nll_loss)(fields, bases); break;
        case NLL_LOSS_BACKWARD: NAME(run_nll_loss_backward)(fields, bases); break;
        case LOOKUP: NAME(run_lookup)(fields, bases); break;
        case LOOKUP_BACKWARD: NAME(run_lookup_backward)(fields, bases); break;
        case SENSITIVITIES: NAME(sensitivities)(fields, bases); break;
        case FINITE: {
            const struct finite *one = fields;
            if (!isfinite(*AT_ONE(x)))
                return NOT_FINITE;
            break;
        }
        }
    }
    return DONE;
}
