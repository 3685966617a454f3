/* One version of the kernel: the body that versions.h includes. */
#include "vectors.h"
#include "vector_functions.h"
#include "products.h"
#include "gelu.h"
#include "gates.h"
#include "convolution.h"
#include "losses.h"
#include "adagrad.h"
#include "tables.h"
#include "layer.h"
#include "few_rows.h"
#undef TILE_ROWS
#undef HAS_ROUNDED
