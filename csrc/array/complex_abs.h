/* complex_abs: the absolute value of a complex number, by one formula on every device. C and CUDA C. */
#ifndef FAN_ARRAY_COMPLEX_ABS_H
#define FAN_ARRAY_COMPLEX_ABS_H

#include "array/lowp.h"

#ifndef __CUDACC__
#include <math.h>
#endif

/* fan_complex_abs: returns |z| of finite parts; inf if it exceeds float64. If the square leaves float64's range, both
 * parts are scaled by a power of two. */
FAN_LOW double fan_complex_abs(double re, double im)
{
    double square = re * re + im * im;
    if (square > 1e-280 && square < 1e280)
        return sqrt(square);
    double there = square < 1 ? 0x1p600 : 0x1p-600, back = square < 1 ? 0x1p-600 : 0x1p600;
    re *= there;
    im *= there;
    return sqrt(re * re + im * im) * back;
}

#endif
