/* Promotion against tables that NumPy wrote (np.result_type), and D4 and D5 for the floats that it
 * does not know. */
#include "array/dtype.h"

#include "check.h"

/* NumPy's own dtypes, in the order of the tables. */
static const fan_dtype numpy[] = {
    FAN_DT_BOOL,    FAN_DT_INT8,    FAN_DT_INT16,     FAN_DT_INT32,      FAN_DT_INT64,
    FAN_DT_UINT8,   FAN_DT_UINT16,  FAN_DT_UINT32,    FAN_DT_UINT64,     FAN_DT_FLOAT16,
    FAN_DT_FLOAT32, FAN_DT_FLOAT64, FAN_DT_COMPLEX64, FAN_DT_COMPLEX128,
};
#define N (int)(sizeof numpy / sizeof numpy[0])

/* np.result_type(row, column), as a letter for the place in `numpy`. */
static const char *const promoted[] = {
    "abcdefghijklmn", /* bool */
    "bbcdecdeljklmn", /* int8 */
    "cccdecdelkklmn", /* int16 */
    "ddddeddellllnn", /* int32 */
    "eeeeeeeellllnn", /* int64 */
    "fccdefghijklmn", /* uint8 */
    "gdddegghikklmn", /* uint16 */
    "heeeehhhilllnn", /* uint32 */
    "illlliiiilllnn", /* uint64 */
    "jjklljklljklmn", /* float16 */
    "kkkllkkllkklmn", /* float32 */
    "llllllllllllnn", /* float64 */
    "mmmnnmmnnmmnmn", /* complex64 */
    "nnnnnnnnnnnnnn", /* complex128 */
};

/* np.result_type(row, True), (row, 1), (row, 1.0), (row, 1j). */
static const char *const weak[] = {
    "aeln", /* bool */
    "bbln", /* int8 */
    "ccln", /* int16 */
    "ddln", /* int32 */
    "eeln", /* int64 */
    "ffln", /* uint8 */
    "ggln", /* uint16 */
    "hhln", /* uint32 */
    "iiln", /* uint64 */
    "jjjm", /* float16 */
    "kkkm", /* float32 */
    "llln", /* float64 */
    "mmmm", /* complex64 */
    "nnnn", /* complex128 */
};

/* np.can_cast(row, column, 'same_kind'). */
static const char *const castable[] = {
    "11111111111111", /* bool */
    "01111000011111", /* int8 */
    "01111000011111", /* int16 */
    "01111000011111", /* int32 */
    "01111000011111", /* int64 */
    "01111111111111", /* uint8 */
    "01111111111111", /* uint16 */
    "01111111111111", /* uint32 */
    "01111111111111", /* uint64 */
    "00000000011111", /* float16 */
    "00000000011111", /* float32 */
    "00000000011111", /* float64 */
    "00000000000011", /* complex64 */
    "00000000000011", /* complex128 */
};

static const fan_dtype foreign[] = {FAN_DT_BFLOAT16, FAN_DT_FLOAT8_E4M3FN, FAN_DT_FLOAT8_E5M2};

static fan_dtype letter(char c)
{
    return numpy[c - 'a'];
}

static void numpy_dtypes_promote_as_numpy_has_it(void)
{
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < N; j++) {
            CHECK_STR(fan_dtype_name(fan_dtype_promote(numpy[i], numpy[j])),
                      fan_dtype_name(letter(promoted[i][j])));
        }
    }
}

static void python_scalars_are_weak_as_numpy_has_it(void)
{
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < 4; k++) {
            CHECK_STR(fan_dtype_name(fan_dtype_promote_weak(numpy[i], "bifc"[k])),
                      fan_dtype_name(letter(weak[i][k])));
        }
    }
    for (int i = 0; i < 3; i++) {
        CHECK_INT(fan_dtype_promote_weak(foreign[i], 'b'), foreign[i]);
        CHECK_INT(fan_dtype_promote_weak(foreign[i], 'i'), foreign[i]);
        CHECK_INT(fan_dtype_promote_weak(foreign[i], 'f'), foreign[i]);
        CHECK_INT(fan_dtype_promote_weak(foreign[i], 'c'), FAN_DT_COMPLEX64);
    }
    CHECK_INT(fan_dtype_promote_weak(FAN_DT_INT8, 'x'), FAN_DT_NONE);
}

static void casts_are_same_kind_as_numpy_has_it(void)
{
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < N; j++)
            CHECK(fan_dtype_can_cast(numpy[i], numpy[j]) == (castable[i][j] == '1'));
    }
    for (int i = 0; i < 3; i++) {
        CHECK(fan_dtype_can_cast(FAN_DT_FLOAT64, foreign[i]));
        CHECK(fan_dtype_can_cast(FAN_DT_INT64, foreign[i]));
        CHECK(fan_dtype_can_cast(foreign[i], FAN_DT_FLOAT16));
        CHECK(!fan_dtype_can_cast(foreign[i], FAN_DT_INT64));
        CHECK(!fan_dtype_can_cast(FAN_DT_COMPLEX64, foreign[i]));
    }
    CHECK(!fan_dtype_can_cast(FAN_DT_NONE, FAN_DT_FLOAT64));
    CHECK(!fan_dtype_can_cast(FAN_DT_BOOL, FAN_DT_NONE));
}

static void low_floats_promote_as_d4_says(void)
{
    for (int i = 0; i < 3; i++) {
        fan_dtype low = foreign[i];
        CHECK_INT(fan_dtype_promote(low, low), low);
        CHECK_INT(fan_dtype_promote(low, FAN_DT_FLOAT32), FAN_DT_FLOAT32);
        CHECK_INT(fan_dtype_promote(low, FAN_DT_FLOAT64), FAN_DT_FLOAT64);
        CHECK_INT(fan_dtype_promote(low, FAN_DT_COMPLEX64), FAN_DT_COMPLEX64);
        CHECK_INT(fan_dtype_promote(low, FAN_DT_COMPLEX128), FAN_DT_COMPLEX128);
        for (int j = 0; j < N && fan_dtype_kind(numpy[j]) != 'f'; j++)
            CHECK_INT(fan_dtype_promote(low, numpy[j]), low); /* bool and integers */
    }
    CHECK_INT(fan_dtype_promote(FAN_DT_BFLOAT16, FAN_DT_FLOAT16), FAN_DT_FLOAT32);
    CHECK_INT(fan_dtype_promote(FAN_DT_FLOAT8_E5M2, FAN_DT_FLOAT16), FAN_DT_FLOAT16);
    CHECK_INT(fan_dtype_promote(FAN_DT_FLOAT8_E4M3FN, FAN_DT_BFLOAT16), FAN_DT_BFLOAT16);
    CHECK_INT(fan_dtype_promote(FAN_DT_FLOAT8_E4M3FN, FAN_DT_FLOAT8_E5M2), FAN_DT_NONE);
}

static void every_pair_is_symmetric_and_holds_both(void)
{
    for (int i = 0; i < FAN_DT_COUNT; i++) {
        fan_dtype a = (fan_dtype)i;
        CHECK_INT(fan_dtype_from_name(fan_dtype_name(a)), a);
        CHECK(strchr("biufc", fan_dtype_kind(a)) != NULL);
        CHECK_INT(fan_dtype_promote(a, a), a);
        CHECK_INT(fan_dtype_promote(a, FAN_DT_NONE), FAN_DT_NONE);
        CHECK_INT(fan_dtype_promote(FAN_DT_NONE, a), FAN_DT_NONE);
        bool low = fan_dtype_kind(a) == 'f' && fan_dtype_size(a) < 4;
        CHECK_INT(fan_dtype_accumulate(a), low ? FAN_DT_FLOAT32 : a);
        for (int j = 0; j < FAN_DT_COUNT; j++) {
            fan_dtype b = (fan_dtype)j;
            fan_dtype p = fan_dtype_promote(a, b);
            CHECK_INT(p, fan_dtype_promote(b, a));
            if (p != FAN_DT_NONE) {
                CHECK(fan_dtype_can_cast(a, p) && fan_dtype_can_cast(b, p));
                CHECK_INT(fan_dtype_promote(p, a), p);
            }
        }
    }
    CHECK_STR(fan_dtype_name(FAN_DT_NONE), "none");
    CHECK_INT(fan_dtype_size(FAN_DT_NONE), 0);
    CHECK_INT(fan_dtype_from_name("float"), FAN_DT_NONE);
    CHECK_INT(fan_dtype_from_name(NULL), FAN_DT_NONE);
}

int main(void)
{
    numpy_dtypes_promote_as_numpy_has_it();
    python_scalars_are_weak_as_numpy_has_it();
    casts_are_same_kind_as_numpy_has_it();
    low_floats_promote_as_d4_says();
    every_pair_is_symmetric_and_holds_both();
    return check_done();
}
