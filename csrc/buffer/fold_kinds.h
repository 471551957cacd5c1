/* fold_kinds: how each kind of sum is made: one function, in one file, for each. */
#ifndef FAN_BUFFER_FOLD_KINDS_H
#define FAN_BUFFER_FOLD_KINDS_H

#include "buffer/fold.h"

/* fan_fold_dense: all terms dense: one pass. */
fan_status fan_fold_dense(fan_fold *f, fan_error *err);
/* fan_fold_sparse: all terms sparse (A5, A7), or one of them to be finished. */
fan_status fan_fold_sparse(fan_fold *f, fan_error *err);
/* fan_fold_mixed: dense and sparse in any mix: a dense sum, written term by term in order (A3, A4, A6, A7). It is in
 * the accumulation dtype of each prefix. */
fan_status fan_fold_mixed(fan_fold *f, fan_error *err);
/* fan_fold_exact: an exact one, of dense terms or of sparse ones (A11). */
fan_status fan_fold_exact(fan_fold *f, fan_error *err);
/* fan_fold_absorb: after fan_fold_decide, on the CPU: adds the terms to the slot's exact state, a new or a wider one
 * where it must be. FAN_ERR_NOMEM: nothing happened. */
fan_status fan_fold_absorb(fan_fold *f, const fan_value *like, fan_error *err);
/* fan_fold_objects: pairwise (A1, A8), from `*sum` on, which is that of the first `i` terms. */
fan_status fan_fold_objects(fan_fold *f, fan_value *sum, size_t i, fan_error *err);

#endif
