//! Two threads of Rust fill one fanin buffer. rust_buffer.py makes the declarations with bindgen and compiles this.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals, dead_code)]

/// What bindgen makes of fanin.h.
mod fanin {
    include!(env!("FANIN_RS"));
}

use fanin::*;
use std::ffi::{c_char, CStr};
use std::mem::{size_of, zeroed};
use std::ptr;

/// A buffer of one slot, which any thread may use.
struct Buffer {
    api: &'static fanin_api,
    raw: *mut fanin_buffer,
}

unsafe impl Send for Buffer {}
unsafe impl Sync for Buffer {}

/// An empty error, which a call of the API fills in.
fn failure() -> fanin_failure {
    let mut why: fanin_failure = unsafe { zeroed() };
    why.struct_size = size_of::<fanin_failure>() as _;
    why
}

/// The message of a call that failed.
fn checked(status: fanin_status, why: &fanin_failure) -> Result<(), String> {
    if status == fanin_status_FANIN_OK {
        return Ok(());
    }
    Err(unsafe { CStr::from_ptr(why.text.as_ptr()) }.to_string_lossy().into_owned())
}

impl Buffer {
    fn new(api: &'static fanin_api) -> Result<Buffer, String> {
        let (mut raw, mut why) = (ptr::null_mut(), failure());
        checked(unsafe { api.buffer_new.unwrap()(1, ptr::null(), &mut raw, &mut why) }, &why)?;
        Ok(Buffer { api, raw })
    }

    /// Adds a gradient by key. The buffer copies it, so that it need not live longer than the call.
    fn add(&self, gradient: &[f32], key: i64) -> Result<(), String> {
        let mut shape = [gradient.len() as i64];
        let mut view: fanin_tensor = unsafe { zeroed() };
        view.data = gradient.as_ptr() as *mut _;
        view.device.device_type = 1;
        view.ndim = 1;
        view.dtype = fanin_dl_dtype { code: 2, bits: 32, lanes: 1 };
        view.shape = shape.as_mut_ptr();
        let mut options: fanin_add_options = unsafe { zeroed() };
        options.struct_size = size_of::<fanin_add_options>() as _;
        options.flags = FANIN_ADD_KEY | FANIN_ADD_COPY;
        options.key = key;
        let mut why = failure();
        checked(unsafe { self.api.buffer_add.unwrap()(self.raw, 0, &view, &options, &mut why) }, &why)
    }

    /// The sum; empty if nothing was added.
    fn take(&self) -> Result<Vec<f32>, String> {
        let (mut sum, mut why): (fanin_value, _) = (unsafe { zeroed() }, failure());
        checked(
            unsafe { self.api.buffer_take_one.unwrap()(self.raw, 0, ptr::null(), &mut sum, &mut why) },
            &why,
        )?;
        let mut all = Vec::new();
        if !sum.array.is_null() {
            all.extend_from_slice(unsafe { std::slice::from_raw_parts(sum.data as *const f32, sum.size as usize) });
        }
        unsafe { self.api.drop.unwrap()(&mut sum) };
        Ok(all)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        unsafe { self.api.buffer_free.unwrap()(self.raw) }
    }
}

fn sum_of(api: &'static fanin_api, steps: i64, sizes: [usize; 2]) -> Result<Vec<f32>, String> {
    let buffer = Buffer::new(api)?;
    std::thread::scope(|scope| {
        let produce = |number: i64| {
            let buffer = &buffer;
            let size = sizes[number as usize];
            scope.spawn(move || {
                (0..steps).try_for_each(|k| {
                    buffer.add(&vec![(number + 1) as f32 / (k + 1) as f32; size], 2 * k + number)
                })
            })
        };
        let threads = [produce(0), produce(1)];
        threads.into_iter().try_for_each(|t| t.join().unwrap())
    })?;
    buffer.take()
}

/// For rust_buffer.py: writes the sum to `out`, or the message to `text`, and returns whether it is a sum.
///
/// # Safety
/// `api` is fanin's table, `out` has room for the larger size, `text` for 1024 bytes.
#[no_mangle]
pub unsafe extern "C" fn fill(
    api: *const fanin_api, steps: i64, one: usize, two: usize, out: *mut f32, text: *mut c_char,
) -> bool {
    match sum_of(&*api, steps, [one, two]) {
        Ok(sum) => {
            ptr::copy_nonoverlapping(sum.as_ptr(), out, sum.len());
            true
        }
        Err(message) => {
            let n = message.len().min(1023);
            ptr::copy_nonoverlapping(message.as_ptr() as *const c_char, text, n);
            *text.add(n) = 0;
            false
        }
    }
}
