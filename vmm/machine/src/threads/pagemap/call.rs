//! An ioctl whose argument is a structure of its own.
#![allow(unsafe_code)]
// UNSAFETY: hands a structure to the kernel.

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use std::ffi::c_void;

/// An ioctl that reads and writes a structure; its result is the ioctl's.
pub(super) struct Call<'a, const OPCODE: Opcode, T>(pub(super) &'a mut T);

// SAFETY: the opcode and the structure belong together wherever one is made.
unsafe impl<const OPCODE: Opcode, T> Ioctl for Call<'_, OPCODE, T> {
    type Output = IoctlOutput;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        OPCODE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut *self.0).cast()
    }

    unsafe fn output_from_ptr(
        output: IoctlOutput,
        _: *mut c_void,
    ) -> rustix::io::Result<IoctlOutput> {
        Ok(output)
    }
}
