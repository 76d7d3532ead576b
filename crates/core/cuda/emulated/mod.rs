//! The kernels of caches and indices on the host: their sources, compiled by g++ over the emulated GPU of
//! `tests/emulator`, as a library that tests call.

mod caches;
mod codes;
mod indices;

use std::path::Path;
use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard};

use libloading::{Library, Symbol};

/// One emulated GPU, so one kernel at a time.
static LIBRARY: LazyLock<Mutex<Library>> = LazyLock::new(|| Mutex::new(load()));

/// g++ is a requirement of the tests. Undefined behaviour traps.
fn load() -> Library {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = tempfile();
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "g++".into());
    let mut command = Command::new(&compiler);
    command
        .args(["-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off"])
        .arg("-U_FORTIFY_SOURCE")
        .args(["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"])
        .args(["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"])
        .arg("-I")
        .arg(root.join("kernels"))
        .arg("-I")
        .arg(root.join("tests/emulator"))
        .arg("-o")
        .arg(&scratch)
        .arg(root.join("crates/core/cuda/emulated/kernels.cpp"));
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{compiler:?} is needed to compile the kernels: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // SAFETY: the library is ours; loading it runs constructors of the C++ library only.
    let library = unsafe { Library::new(&scratch) }.unwrap();
    std::fs::remove_file(&scratch).unwrap();
    library
}

fn tempfile() -> std::path::PathBuf {
    std::env::temp_dir().join(format!("ferromla_emulated_{}.so", std::process::id()))
}

fn library() -> MutexGuard<'static, Library> {
    LIBRARY
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Runs a kernel over host memory.
///
/// # Safety
/// `params` is what the kernel takes and describes live host memory.
pub(super) unsafe fn run<T>(kernel: &str, params: &T, blocks: u32, threads: u32) {
    let library = library();
    // SAFETY: this is the signature in kernels.cpp, and the caller's promise.
    unsafe {
        let entry: Symbol<'_, unsafe extern "C" fn(*const T, u32, u32)> = library
            .get(format!("emulated_{kernel}").as_bytes())
            .unwrap();
        entry(params, blocks, threads);
    }
}

/// Calls a function of one argument.
///
/// # Safety
/// The name is that of a function of this signature.
pub(super) unsafe fn call<A, R>(name: &str, arguments: impl IntoIterator<Item = A>) -> Vec<R> {
    let library = library();
    // SAFETY: the caller's promise.
    let entry: Symbol<'_, unsafe extern "C" fn(A) -> R> =
        unsafe { library.get(format!("emulated_{name}").as_bytes()).unwrap() };
    arguments
        .into_iter()
        // SAFETY: the caller's promise.
        .map(|argument| unsafe { entry(argument) })
        .collect()
}

/// Calls a function of a number and an array.
///
/// # Safety
/// The name is that of a function of this signature, which stays within the array.
pub(super) unsafe fn fill<A, R>(name: &str, argument: A, array: &mut [R]) {
    let library = library();
    // SAFETY: the caller's promise.
    unsafe {
        let entry: Symbol<'_, unsafe extern "C" fn(A, *mut R)> =
            library.get(format!("emulated_{name}").as_bytes()).unwrap();
        entry(argument, array.as_mut_ptr());
    }
}
