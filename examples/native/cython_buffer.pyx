# cython: language_level=3
"""A fanin buffer in Cython, which adds and takes without the GIL. cython_buffer.py builds it."""
from cpython.pycapsule cimport PyCapsule_Import
from libc.stdint cimport int64_t, int32_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "fanin.h" nogil:
    ctypedef enum fanin_status:
        FANIN_OK

    ctypedef struct fanin_dl_device:
        int32_t device_type
        int32_t device_id

    ctypedef struct fanin_dl_dtype:
        uint8_t code
        uint8_t bits
        uint16_t lanes

    ctypedef struct fanin_tensor:
        void *data
        fanin_dl_device device
        int32_t ndim
        fanin_dl_dtype dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset

    ctypedef struct fanin_failure:
        size_t struct_size
        char text[1024]

    ctypedef struct fanin_value:
        int64_t size

    ctypedef struct fanin_buffer:
        pass

    ctypedef struct fanin_api:
        uint32_t version
        void (*drop)(fanin_value *) noexcept nogil
        object (*to_python)(const fanin_value *)  # with the GIL
        fanin_status (*buffer_new)(size_t, const void *, fanin_buffer **, fanin_failure *) noexcept nogil
        void (*buffer_free)(fanin_buffer *) noexcept nogil
        fanin_status (*buffer_add)(fanin_buffer *, size_t, const fanin_tensor *, const void *, fanin_failure *) noexcept nogil
        fanin_status (*buffer_take_one)(fanin_buffer *, size_t, const void *, fanin_value *, fanin_failure *) noexcept nogil


cdef const fanin_api *api = <const fanin_api *>PyCapsule_Import("fanin._core._C_API", 0)
if api.version < 2:
    raise ImportError("this module needs version 2 of fanin's C API: upgrade fanin")


cdef class Buffer:
    """A buffer of one slot, of arrays of float64 that the caller keeps until `take`."""

    cdef fanin_buffer *buffer
    cdef list kept

    def __cinit__(self):
        cdef fanin_failure why
        why.struct_size = sizeof(why)
        self.kept = []
        if api.buffer_new(1, NULL, &self.buffer, &why) != FANIN_OK:
            raise RuntimeError(why.text.decode())

    def __dealloc__(self):
        api.buffer_free(self.buffer)

    def add(self, double[::1] x):
        cdef fanin_failure why
        cdef fanin_tensor view
        cdef int64_t shape[1]
        cdef fanin_status status
        why.struct_size = sizeof(why)
        shape[0] = x.shape[0]
        view.data = &x[0]
        view.device = fanin_dl_device(1, 0)
        view.ndim = 1
        view.dtype = fanin_dl_dtype(2, 64, 1)
        view.shape = shape
        view.strides = NULL
        view.byte_offset = 0
        with nogil:
            status = api.buffer_add(self.buffer, 0, &view, NULL, &why)
        if status != FANIN_OK:
            raise ValueError(why.text.decode())
        self.kept.append(x)

    def take(self):
        cdef fanin_failure why
        cdef fanin_value sum
        cdef fanin_status status
        why.struct_size = sizeof(why)
        with nogil:
            status = api.buffer_take_one(self.buffer, 0, NULL, &sum, &why)
        if status != FANIN_OK:
            raise ValueError(why.text.decode())
        self.kept.clear()
        try:
            return api.to_python(&sum)
        finally:
            api.drop(&sum)
