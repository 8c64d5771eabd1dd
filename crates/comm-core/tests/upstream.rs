//! `docs/upstream.md` and the public API agree.
//!
//! The document names our counterparts by path. Each path it names is proven here, at compile time, to exist; and
//! the two sets are compared, so that neither a renamed method nor an edited row goes unnoticed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use comm_core::{Host, Result, Scope, op};

/// Issues that rows may be put off to.
const ISSUES: std::ops::RangeInclusive<u32> = 4..=7;

/// The path as text, from the same tokens as its proof.
macro_rules! name {
    ($($seg:ident)::+) => { [$(stringify!($seg)),+].join("::") };
}

/// Something that can be imported: a type, a trait, a function, a module.
macro_rules! item {
    ($($seg:ident)::+) => {{
        #[allow(unused_imports)]
        use $($seg)::+ as _;
        name!($($seg)::+)
    }};
}

/// An associated function or a method of a type; with its generic arguments, or coerced to a function pointer where
/// an argument is `impl Trait`.
macro_rules! value {
    ($($seg:ident)::+ as $t:ty) => {{
        let _: $t = $($seg)::+;
        name!($($seg)::+)
    }};
    ($($seg:ident)::+ $([$($g:ty),+])?) => {{
        let _ = $($seg)::+ $(::<$($g),+>)?;
        name!($($seg)::+)
    }};
}

/// A method of a trait.
macro_rules! method {
    ($($seg:ident)::+, $method:ident) => {{
        let _ = <dyn $($seg)::+>::$method;
        name!($($seg)::+::$method)
    }};
}

/// A public field.
macro_rules! field {
    ($($seg:ident)::+, $field:ident) => {{
        let _ = |x: &$($seg)::+| {
            let _ = &x.$field;
        };
        name!($($seg)::+::$field)
    }};
}

/// A variant of an enum.
macro_rules! variant {
    ($($seg:ident)::+, $variant:ident) => {{
        let _ = |x: &$($seg)::+| matches!(x, $($seg)::+::$variant { .. });
        name!($($seg)::+::$variant)
    }};
}

/// Every path that the document may name.
fn proven() -> Vec<String> {
    vec![
        // Making communicators
        item!(comm_core::new_comm),
        item!(comm_core::register_backend),
        item!(comm_core::built_backends),
        item!(comm_core::is_backend_built),
        item!(comm_core::Factory),
        item!(comm_core::Device),
        value!(comm_core::Device::cuda),
        item!(comm_core::CommOptions),
        value!(comm_core::CommOptions::name as fn(_, &'static str) -> _),
        value!(comm_core::CommOptions::timeout),
        value!(comm_core::CommOptions::dynamic),
        value!(comm_core::CommOptions::hint as fn(_, &'static str, &'static str) -> _),
        item!(comm_core::CallOptions),
        value!(comm_core::CallOptions::timeout),
        value!(comm_core::CallOptions::tag),
        value!(comm_core::CallOptions::stream),
        value!(comm_core::CallOptions::hint as fn(_, &'static str, &'static str) -> _),
        // Communicators
        item!(comm_core::Communicator),
        value!(comm_core::Communicator::from_backend),
        value!(comm_core::Communicator::rank),
        value!(comm_core::Communicator::size),
        value!(comm_core::Communicator::name),
        value!(comm_core::Communicator::device),
        value!(comm_core::Communicator::backend_name),
        value!(comm_core::Communicator::ranks),
        value!(comm_core::Communicator::alloc),
        value!(comm_core::Communicator::control),
        value!(comm_core::Communicator::with),
        value!(comm_core::Communicator::observe),
        value!(comm_core::Communicator::finalize),
        value!(comm_core::Communicator::split as fn(_, _, &'static str) -> _),
        value!(comm_core::Communicator::split_async as fn(_, _, &'static str) -> _),
        value!(comm_core::Communicator::split_by as fn(_, _, _, &'static str) -> _),
        value!(comm_core::Communicator::split_by_async as fn(_, _, _, &'static str) -> _),
        value!(comm_core::Communicator::split_by_host as fn(_, &'static str) -> _),
        value!(comm_core::Communicator::split_by_host_async as fn(_, &'static str) -> _),
        value!(comm_core::Communicator::dup as fn(_, &'static str) -> _),
        value!(comm_core::Communicator::dup_async as fn(_, &'static str) -> _),
        value!(comm_core::SplitOptions::new as fn(&'static str) -> _),
        value!(comm_core::SplitOptions::hint as fn(_, &'static str, &'static str) -> _),
        value!(comm_core::SplitOptions::timeout),
        value!(comm_core::SplitOptions::split_timeout),
        value!(comm_core::SplitOptions::observer),
        value!(comm_core::SplitOptions::inherit_observers),
        value!(comm_core::Communicator::agree_survivors),
        value!(comm_core::Communicator::shrink),
        value!(comm_core::Communicator::abort),
        value!(comm_core::abort_all as fn(Vec<&'static comm_core::Communicator>, _)),
        value!(comm_core::Communicator::cause),
        value!(comm_core::Communicator::is_failed),
        value!(comm_core::Communicator::monitored_barrier),
        item!(comm_core::Members),
        value!(comm_core::Communicator::reconfigure_async as fn(_, _, Vec<String>, _, _) -> _),
        value!(comm_core::Communicator::init_handle),
        value!(comm_core::Communicator::reconfigure as fn(_, _, Vec<String>, _, _) -> _),
        field!(comm_core::ReconfigureRequest, uuid),
        field!(comm_core::ReconfigureRequest, options),
        field!(comm_core::ReconfigureRequest, timeout),
        // Operations
        value!(comm_core::Communicator::send [Host, &[f32]]),
        value!(comm_core::Communicator::send_async [Host, Vec<f32>]),
        value!(comm_core::Communicator::recv [Host, &mut [f32]]),
        value!(comm_core::Communicator::recv_async [Host, Vec<f32>]),
        value!(comm_core::Communicator::sendrecv [Host, &[f32], &mut [i8]]),
        value!(comm_core::Communicator::sendrecv_async [Host, Vec<f32>, Vec<i8>]),
        value!(comm_core::Communicator::broadcast [Host, &mut [f32]]),
        value!(comm_core::Communicator::all_reduce [Host, &mut [f32], op::Sum]),
        value!(comm_core::Communicator::all_reduce_async [Host, Vec<f32>, op::Sum]),
        value!(comm_core::Communicator::all_reduce_into [Host, &[f32], &mut [f32], op::Sum]),
        value!(comm_core::Communicator::reduce [Host, &mut [f32], op::Sum]),
        value!(comm_core::Communicator::reduce_into [Host, &[f32], &mut [f32], op::Sum]),
        value!(comm_core::Communicator::scan [Host, &mut [f32], op::Sum]),
        value!(comm_core::Communicator::scan_into [Host, &[f32], &mut [f32], op::Sum]),
        value!(comm_core::Communicator::exscan [Host, &mut [f32], op::Sum]),
        value!(comm_core::Communicator::exscan_into [Host, &[f32], &mut [f32], op::Sum]),
        value!(comm_core::Communicator::all_gather [Host, &[f32], &mut [f32]]),
        value!(comm_core::Communicator::all_gather_in_place [Host, &mut [f32]]),
        value!(comm_core::Communicator::all_gather_list [Host, &[f32], &mut [Vec<f32>]]),
        value!(comm_core::Communicator::all_gather_list_async [Host, Vec<f32>, Vec<Vec<f32>>]),
        value!(comm_core::Communicator::all_gather_v [Host, &[f32], &mut [f32]]),
        value!(comm_core::Communicator::all_gather_v_in_place [Host, &mut [f32]]),
        value!(comm_core::Communicator::all_gather_v_list [Host, &[f32], &mut [Vec<f32>]]),
        value!(comm_core::Communicator::gather [Host, &[f32], &mut [f32]]),
        value!(comm_core::Communicator::gather_in_place [Host, &mut [f32]]),
        value!(comm_core::Communicator::gather_list [Host, &[f32], &mut [Vec<f32>]]),
        value!(comm_core::Communicator::gather_v [Host, &[f32], &mut [f32]]),
        value!(comm_core::Communicator::gather_v_in_place [Host, &mut [f32]]),
        value!(comm_core::Communicator::gather_v_list [Host, &[f32], &mut [Vec<f32>]]),
        value!(comm_core::Communicator::scatter [Host, &[f32], &mut [f32]]),
        value!(comm_core::Communicator::scatter_in_place [Host, &mut [f32]]),
        value!(comm_core::Communicator::scatter_list [Host, &[Vec<f32>], &mut [f32]]),
        value!(comm_core::Communicator::scatter_v [Host, &[f32], &mut [f32]]),
        value!(comm_core::Communicator::scatter_v_in_place [Host, &mut [f32]]),
        value!(comm_core::Communicator::scatter_v_list [Host, &[Vec<f32>], &mut [f32]]),
        value!(comm_core::Communicator::reduce_scatter [Host, &[f32], &mut [f32], op::Sum]),
        value!(comm_core::Communicator::reduce_scatter_in_place [Host, &mut [f32], op::Sum]),
        value!(comm_core::Communicator::reduce_scatter_list [Host, &[Vec<f32>], &mut [f32], op::Sum]),
        value!(comm_core::Communicator::reduce_scatter_list_async [Host, Vec<Vec<f32>>, Vec<f32>, op::Sum]),
        value!(comm_core::Communicator::reduce_scatter_v [Host, &[f32], &mut [f32], op::Sum]),
        value!(comm_core::Communicator::reduce_scatter_v_in_place [Host, &mut [f32], op::Sum]),
        value!(comm_core::Communicator::reduce_scatter_v_list [Host, &[Vec<f32>], &mut [f32], op::Sum]),
        value!(comm_core::Communicator::all_to_all [Host, &[f32], &mut [f32]]),
        value!(comm_core::Communicator::all_to_all_in_place [Host, &mut [f32]]),
        value!(comm_core::Communicator::all_to_all_list [Host, &[Vec<f32>], &mut [Vec<f32>]]),
        value!(comm_core::Communicator::all_to_all_list_async [Host, Vec<Vec<f32>>, Vec<Vec<f32>>]),
        value!(comm_core::Communicator::all_to_all_v [Host, &[f32], &mut [f32]]),
        value!(comm_core::Communicator::all_to_all_v_list [Host, &[Vec<f32>], &mut [Vec<f32>]]),
        value!(comm_core::Communicator::barrier),
        value!(comm_core::Communicator::barrier_async),
        value!(comm_core::Communicator::batch),
        value!(comm_core::Communicator::batch_async),
        value!(comm_core::Communicator::batch_again),
        value!(comm_core::Communicator::scope [for<'s> fn(&'s Scope<'s, 'static>) -> Result<()>, ()]),
        value!(comm_core::Communicator::group [for<'s> fn(&'s Scope<'s, 'static>) -> Result<()>, ()]),
        value!(comm_core::Scope::batch),
        item!(comm_core::Batch),
        value!(comm_core::Batch::send[f32]),
        value!(comm_core::Batch::recv[f32]),
        value!(comm_core::Batch::ops),
        value!(comm_core::Batch::issue),
        item!(comm_core::AsyncBatch),
        value!(comm_core::AsyncBatch::send [Host, Vec<f32>]),
        value!(comm_core::AsyncBatch::recv [Host, Vec<f32>]),
        value!(comm_core::AsyncBatch::ops),
        value!(comm_core::AsyncBatch::issue),
        item!(comm_core::ScopedBatch),
        value!(comm_core::ScopedBatch::ops),
        value!(comm_core::ScopedBatch::issue),
        item!(comm_core::BatchBuffers),
        item!(comm_core::BatchedOp),
        item!(comm_core::Work),
        value!(comm_core::Work::wait as fn(comm_core::Work<()>) -> _),
        value!(comm_core::Work::wait_host as fn(comm_core::Work<()>) -> _),
        value!(comm_core::Work::is_completed as fn(&comm_core::Work<()>) -> _),
        value!(comm_core::wait_all as fn(Vec<comm_core::Work<()>>) -> _),
        value!(comm_core::wait_any[()]),
        // Vocabulary
        item!(comm_core::IntoBufMut),
        item!(comm_core::IntoBufList),
        item!(comm_core::IntoBufListMut),
        item!(comm_core::Pod),
        item!(comm_core::Operator),
        item!(comm_core::op),
        item!(comm_core::op::Sum),
        item!(comm_core::op::custom),
        item!(comm_core::ReduceOp),
        variant!(comm_core::ReduceOp, Sum),
        item!(comm_core::DType),
        value!(comm_core::DType::size),
        variant!(comm_core::DType, Bf16),
        variant!(comm_core::DType, F16),
        variant!(comm_core::DType, F32),
        item!(comm_core::Operation),
        value!(comm_core::Operation::name),
        variant!(comm_core::ErrorKind, Unsupported),
        variant!(comm_core::ErrorKind, Mismatch),
        // Observers
        item!(comm_core::Observer),
        method!(comm_core::Observer, pre),
        method!(comm_core::Observer, event),
        item!(comm_core::ObserverGuard),
        value!(comm_core::ObserverGuard::detach),
        item!(comm_core::Call),
        field!(comm_core::Call, desc),
        field!(comm_core::Call, number),
        field!(comm_core::Call, op_id),
        item!(comm_core::Event),
        variant!(comm_core::Event, Aborted),
        variant!(comm_core::Event, Completed),
        variant!(comm_core::Event, Failed),
        // Backends
        item!(comm_core::Backend),
        field!(comm_core::BackendInfo, name),
        field!(comm_core::BackendInfo, rank),
        field!(comm_core::BackendInfo, size),
        item!(comm_core::Support),
        item!(comm_core::Control),
        item!(comm_core::host_backend),
        item!(comm_core::HostBackend),
        method!(comm_core::HostBackend, all_reduce),
        method!(comm_core::HostBackend, finalize),
        method!(comm_core::HostBackend, supports),
        item!(comm_core::ext::Allocator),
        item!(comm_core::ext::Persistent),
        item!(comm_core::ext::PersistentOp),
        item!(comm_core::ext::Registration),
        item!(comm_core::ext::Rma),
        item!(comm_core::ext::WindowOps),
        method!(comm_core::ext::WindowOps, put),
        method!(comm_core::ext::WindowOps, signal),
        method!(comm_core::ext::WindowOps, wait_signal),
    ]
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn document() -> String {
    let path = root().join("docs/upstream.md");
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

struct Row {
    line: usize,
    section: String,
    upstream: String,
    ours: String,
    why: String,
}

/// The rows of all tables, without their heads.
fn rows(document: &str) -> Vec<Row> {
    let (mut rows, mut section) = (Vec::new(), String::new());
    for (i, line) in document.lines().enumerate() {
        if let Some(heading) = line.strip_prefix("## ") {
            section = heading.to_owned();
        }
        if !line.starts_with('|') || line.starts_with("|---") || line.starts_with("| upstream |") {
            continue;
        }
        let inner = line.strip_prefix('|').and_then(|l| l.strip_suffix('|')).unwrap_or_default();
        let cells: Vec<String> = inner.split('|').map(|c| c.trim().to_owned()).collect();
        let [upstream, ours, why] =
            <[String; 3]>::try_from(cells).unwrap_or_else(|c| panic!("line {}: {} cells instead of 3", i + 1, c.len()));
        rows.push(Row { line: i + 1, section: section.clone(), upstream, ours, why });
    }
    rows
}

/// Every `comm_core::…` path in a text.
fn paths(text: &str) -> BTreeSet<String> {
    let part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    text.match_indices("comm_core::")
        .map(|(at, _)| {
            let rest = &text[at..];
            let end = rest.find(|c| !part(c)).unwrap_or(rest.len());
            rest[..end].trim_end_matches(':').to_owned()
        })
        .collect()
}

#[test]
fn the_document_names_exactly_the_proven_paths() {
    let list = proven();
    let proven: BTreeSet<String> = list.iter().cloned().collect();
    assert_eq!(list.len(), proven.len(), "a path is proven twice");
    let named = paths(&document());
    let unproven: Vec<_> = named.difference(&proven).collect();
    let unnamed: Vec<_> = proven.difference(&named).collect();
    assert!(
        unproven.is_empty() && unnamed.is_empty(),
        "docs/upstream.md names, but this test does not prove: {unproven:?}\nproven here, but not named there: {unnamed:?}"
    );
}

#[test]
fn every_row_has_an_answer_and_a_reason() {
    let document = document();
    let rows = rows(&document);
    assert!(rows.len() > 200, "only {} rows were found", rows.len());
    let mut seen = BTreeMap::new();
    for Row { line, section, upstream, ours, why } in &rows {
        assert!(!upstream.is_empty() && !why.is_empty(), "line {line}: an empty cell");
        let put_off = || {
            let issue = ours.strip_prefix("later: issue ").and_then(|n| n.parse().ok());
            let krate = ours.strip_prefix("later: crate `").and_then(|n| n.strip_suffix('`'));
            issue.is_some_and(|n| ISSUES.contains(&n)) || krate.is_some_and(|n| !n.is_empty())
        };
        if ours.starts_with('`') {
            let path = ours.trim_matches('`');
            assert!(paths(path).contains(path), "line {line}: '{ours}' is not one path of this workspace");
            assert!(why.starts_with("resolves"), "line {line}: a path exists, so say that it resolves");
        } else {
            assert!(ours == "none" || put_off(), "line {line}: '{ours}' is neither a path, nor later, nor none");
            assert!(!why.starts_with("resolves"), "line {line}: nothing resolves here");
        }
        if let Some(earlier) = seen.insert((section, upstream), line) {
            panic!("line {line}: '{upstream}' has a row at line {earlier} already");
        }
    }
}

#[test]
fn every_operation_of_others_has_a_row() {
    let document = document();
    let rows = rows(&document);
    let has = |library: &str, name: &str| {
        let section = |r: &&Row| r.section.starts_with("Operations by name") && r.section.contains(library);
        rows.iter().filter(section).any(|r| r.upstream.split('`').skip(1).step_by(2).any(|n| n == name))
    };
    let torchcomms = "send recv broadcast all_reduce reduce all_gather all_gather_v all_gather_single reduce_scatter \
        reduce_scatter_v reduce_scatter_single all_to_all all_to_all_single all_to_all_v_single barrier scatter gather \
        gather_single batch_op_create BatchSendRecv.push BatchSendRecv.ops BatchSendRecv.issue";
    let nccl = "ncclSend ncclRecv ncclBroadcast ncclAllReduce ncclReduce ncclAllGather ncclReduceScatter ncclAlltoAll \
        ncclGather ncclScatter ncclGroupStart ncclGroupEnd";
    let mpi = "Send Recv Sendrecv Bcast Allreduce Reduce Allgather Allgatherv Reduce_scatter_block Reduce_scatter Alltoall \
        Alltoallv Alltoallw Gather Gatherv Scatter Scatterv Scan Exscan Barrier";
    for name in torchcomms.split_whitespace() {
        assert!(has("torchcomms", name), "{name}");
    }
    for name in nccl.split_whitespace() {
        assert!(has("NCCL", name), "{name}");
    }
    for name in mpi.split_whitespace() {
        assert!(has("MPI", &format!("MPI_{name}")), "MPI_{name}");
    }
    assert!(!has("MPI", "MPI_Everything"));
}

#[test]
fn files_named_as_tests_exist() {
    let document = document();
    let mut checked = 0;
    for row in rows(&document) {
        for file in row.why.split('`').skip(1).step_by(2).filter(|c| c.starts_with("crates/") || c.ends_with(".rs")) {
            assert!(root().join(file).is_file(), "line {}: {file} does not exist", row.line);
            checked += 1;
        }
    }
    assert!(checked > 10, "only {checked} files were named");
}

#[test]
fn paths_are_cut_where_they_end() {
    let text = "`comm_core::a::B`, comm_core::op: x (`comm_core::c`) comm_cores::d";
    assert_eq!(paths(text).into_iter().collect::<Vec<_>>(), ["comm_core::a::B", "comm_core::c", "comm_core::op"]);
    let table = "## S\n| upstream | ours | test or reason |\n|---|---|---|\n| a | none | b |\n";
    let rows = rows(table);
    assert_eq!((rows.len(), rows[0].line, rows[0].section.as_str(), rows[0].why.as_str()), (1, 4, "S", "b"));
}
