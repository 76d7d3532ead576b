//! Memory of a device, by addresses, for tests.

use std::cell::RefCell;

use ferromla::{Device, Stream};

/// Allocates, reads and writes; everything is freed with the value.
pub trait Memory {
    fn device(&self) -> Device;
    /// New memory with these elements; 16-byte aligned.
    fn upload<T: Copy>(&self, values: &[T]) -> u64;
    /// Overwrites, in stream order.
    fn write<T: Copy>(&self, to: u64, values: &[T], stream: Stream);
    /// Reads once the stream has passed.
    fn download<T: Copy + Default>(&self, from: u64, len: usize, stream: Stream) -> Vec<T>;
}

#[derive(Default)]
pub struct Host {
    blocks: RefCell<Vec<Vec<u128>>>,
}

impl Memory for Host {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn upload<T: Copy>(&self, values: &[T]) -> u64 {
        let mut block = vec![0u128; size_of_val(values).div_ceil(16) + 1];
        let ptr = block.as_mut_ptr() as u64;
        self.blocks.borrow_mut().push(block);
        self.write(ptr, values, Stream::default());
        ptr
    }

    fn write<T: Copy>(&self, to: u64, values: &[T], _: Stream) {
        // SAFETY: `to` is a block of this host of at least this size.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), to as *mut T, values.len()) };
    }

    fn download<T: Copy + Default>(&self, from: u64, len: usize, _: Stream) -> Vec<T> {
        let mut values = vec![T::default(); len];
        // SAFETY: `from` is a block of this host of at least this size.
        unsafe { std::ptr::copy_nonoverlapping(from as *const T, values.as_mut_ptr(), len) };
        values
    }
}
