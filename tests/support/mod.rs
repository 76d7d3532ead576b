//! Host arrays whose description a test can bend.

use ferromla::{DType, Device, View};

/// Memory of its own and a description of it that may lie.
pub struct Array {
    pub ptr: u64,
    pub dtype: DType,
    pub device: Device,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
    _memory: Vec<u128>,
}

impl Array {
    pub fn zeros(dtype: DType, shape: &[i64]) -> Self {
        let elements: i64 = shape.iter().product();
        let mut memory = vec![0u128; (elements as usize * dtype.size() as usize).div_ceil(16) + 1];
        let mut array = Self {
            ptr: memory.as_mut_ptr() as u64,
            dtype,
            device: Device::Cpu,
            shape: Vec::new(),
            strides: Vec::new(),
            _memory: memory,
        };
        array.reshape(shape);
        array
    }

    /// A workspace for small calls, with any number of CPU threads.
    #[allow(dead_code)] // in programs that plan nothing
    pub fn workspace() -> Self {
        Self::zeros(DType::U8, &[1 << 28]) // zeros that nobody writes to take no memory
    }

    /// Another shape, row-major.
    pub fn reshape(&mut self, shape: &[i64]) {
        self.shape = shape.to_vec();
        self.strides = ferromla::Dims::new(shape).contiguous_strides().to_vec();
    }

    pub fn view(&self) -> View {
        // SAFETY: what lies about its memory is refused before it is touched, as the tests demand.
        unsafe {
            View::new(
                self.ptr as *const _,
                self.dtype,
                self.device,
                &self.shape,
                &self.strides,
            )
        }
    }
}

/// What an error is expected to say.
pub struct Expected {
    pub argument: &'static str,
    pub unsupported: bool,
    /// Part of the rule or the value.
    pub says: &'static str,
}

/// The call was refused, for this argument and by this rule.
pub fn assert_refused(case: &str, result: Result<(), ferromla::Error>, expected: &Expected) {
    let error = match result {
        Ok(()) => panic!("{case}: accepted"),
        Err(error) => error,
    };
    assert_eq!(error.argument(), Some(expected.argument), "{case}: {error}");
    let unsupported = matches!(error, ferromla::Error::Unsupported { .. });
    assert_eq!(unsupported, expected.unsupported, "{case}: {error}");
    assert!(
        error.to_string().contains(expected.says),
        "{case}: {error:?} does not say {:?}",
        expected.says
    );
}
