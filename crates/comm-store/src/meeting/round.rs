//! Which start of a run this is, where the launcher does not number it.
//!
//! torchrun's agents count the restarts that they asked for themselves: when the ranks of one agent fail, those of the others
//! start anew with the number that they had, mostly at the same store, in which the keys of the earlier start still are.
//! (PyTorch 2.15 itself fails to meet then.) So the ranks agree on a name in the store. What makes old keys harmless is that all
//! ranks of the earlier start have ended before the first one of this start begins, as torchrun sees to: only a
//! rank 0 of this start can answer a question that is asked now.

use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Result, Store};

/// How often rank 0 looks for questions that came in place of old ones.
const LOOK: Duration = Duration::from_millis(20);

/// Agrees with all other ranks on a name for this start; all get the same, and no other start does.
pub(super) fn agree(store: &dyn Store, run: &str, rank: usize, size: usize, deadline: Instant) -> Result<String> {
    let scope = format!("rustcomms/{run}/start");
    let left = || deadline.saturating_duration_since(Instant::now());
    let mine = format!("{:016x}", crate::file::random());
    if rank != 0 {
        store.set(&format!("{scope}/asks/{rank}"), mine.as_bytes())?;
        let answer = format!("{scope}/answers/{mine}");
        let name = store.get(&answer, left()).map_err(|e| late(e, "rank 0 did not answer in time", vec![0]))?;
        store.delete_key(&answer)?;
        let name = String::from_utf8(name).ok().filter(|n| n.len() == mine.len()).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt { rank: Some(0), what: "its name for this start of the run".into() })
        })?;
        if store.add(&format!("{scope}/{name}/know"), 1)? == size as i64 - 1 {
            store.set(&format!("{scope}/{name}/all"), b"")?;
        }
        store.set(&format!("{scope}/{name}/knows/{rank}"), b"")?;
        return Ok(name);
    }
    let asks: Vec<String> = (1..size).map(|r| format!("{scope}/asks/{r}")).collect();
    let asks: Vec<&str> = asks.iter().map(String::as_str).collect();
    let all = format!("{scope}/{mine}/all");
    let mut answered: Vec<Vec<u8>> = vec![Vec::new(); asks.len()];
    let missing = || {
        let knows = |r: &usize| store.check(&[&format!("{scope}/{mine}/knows/{r}")]).unwrap_or(false);
        (1..size).filter(|r| !knows(r)).collect::<Vec<_>>()
    };
    loop {
        let asked = store.multi_get(&asks, left()).map_err(|e| late(e, "not all ranks came in time", missing()))?;
        let new: Vec<String> = asked
            .iter()
            .zip(&answered)
            .filter(|(new, old)| new != old)
            .map(|(new, _)| format!("{scope}/answers/{}", String::from_utf8_lossy(new)))
            .collect();
        if !new.is_empty() {
            store.multi_set(&new.iter().map(|k| (k.as_str(), mine.as_bytes())).collect::<Vec<_>>())?;
        }
        answered = asked;
        match store.wait(&[&all], left().min(LOOK)) {
            Ok(()) => return Ok(mine),
            Err(e) if matches!(e.kind(), ErrorKind::Timeout { .. }) && !left().is_zero() => {}
            Err(e) => return Err(late(e, "not all ranks came in time", missing())),
        }
    }
}

/// A timeout in terms of ranks.
fn late(e: Error, what: &str, missing: Vec<usize>) -> Error {
    if !matches!(e.kind(), ErrorKind::Timeout { .. }) {
        return e;
    }
    let what = format!("{what}, to agree on a name for this start of the run");
    Error::new(ErrorKind::Bootstrap { what, arrived: Vec::new(), missing })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;

    const LONG: Duration = Duration::from_secs(30);

    /// These ranks of a world start, in this order; what each got.
    fn start(store: &MemoryStore, size: usize, ranks: &[usize], timeout: Duration) -> Vec<Result<String>> {
        std::thread::scope(|scope| {
            let mut all = Vec::new();
            for rank in ranks.iter().copied() {
                all.push(scope.spawn(move || agree(store, "job", rank, size, Instant::now() + timeout)));
                std::thread::sleep(Duration::from_millis(10));
            }
            all.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    fn name(results: Vec<Result<String>>) -> String {
        let names: std::collections::HashSet<String> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(names.len(), 1, "{names:?}");
        names.into_iter().next().unwrap()
    }

    #[test]
    fn each_start_has_a_name_of_its_own() {
        let store = MemoryStore::new();
        let orders: [&[usize]; 4] = [&[0, 1, 2, 3], &[3, 2, 1, 0], &[1, 0, 3, 2], &[0, 3, 1, 2]];
        let names: std::collections::HashSet<_> = orders.iter().map(|o| name(start(&store, 4, o, LONG))).collect();
        assert_eq!(names.len(), 4);
        // The world may have another size then.
        assert!(!names.contains(&name(start(&store, 3, &[0, 1, 2], LONG))));
        assert!(!names.contains(&name(start(&store, 5, &[4, 1, 0, 2, 3], LONG))));
    }

    #[test]
    fn a_start_that_failed_leaves_nothing_that_misleads() {
        for gone in 0..3 {
            let store = MemoryStore::new();
            let ranks: Vec<usize> = (0..3).filter(|r| *r != gone).collect();
            for e in start(&store, 3, &ranks, Duration::from_millis(100)).into_iter().filter_map(Result::err) {
                let ErrorKind::Bootstrap { missing, .. } = e.kind() else { panic!("{e}") };
                assert!(missing.contains(&gone) || missing == &[0], "{e}");
            }
            name(start(&store, 3, &[2, 1, 0], LONG));
            name(start(&store, 3, &[0, 1, 2], LONG));
        }
    }

    #[test]
    fn questions_and_answers_do_not_pile_up() {
        let store = MemoryStore::new();
        name(start(&store, 3, &[0, 1, 2], LONG));
        let once = store.num_keys().unwrap();
        name(start(&store, 3, &[0, 1, 2], LONG));
        assert!(store.num_keys().unwrap() <= once + 6, "{:?}", store.list_keys());
    }
}
