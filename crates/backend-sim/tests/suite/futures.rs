//! `Work` as a future: nobody drives but the engine.

use std::time::Duration;

use comm_core::{Communicator, Result, Work, op};

use super::Rank;

const COUNTS: [usize; 4] = [1, 1000, 40_000, 0];

fn issue(comm: &Communicator, k: usize) -> Result<Work<Vec<u64>>> {
    comm.all_reduce_async(vec![(comm.rank() + k) as u64; COUNTS[k % COUNTS.len()]], op::Sum)
}

fn check(comm: &Communicator, k: usize, x: &[u64]) {
    let want = (0..comm.size()).map(|q| (q + k) as u64).sum::<u64>();
    assert_eq!(x.len(), COUNTS[k % COUNTS.len()]);
    assert!(x.iter().all(|v| *v == want), "future {k}");
}

/// On the calling thread, without a runtime.
pub fn blocking(r: &Rank<'_>) -> Result<()> {
    pollster::block_on(async {
        for k in 0..20 {
            check(r.comm, k, &issue(r.comm, k)?.await?);
        }
        let works = (0..20).map(|k| issue(r.comm, k)).collect::<Result<Vec<_>>>()?;
        // The last one first.
        for (k, w) in works.into_iter().enumerate().rev() {
            check(r.comm, k, &w.await?);
        }
        r.comm.barrier_async()?.await
    })
}

/// On tokio, several at once, waited for by tasks of their own.
pub fn tokio_tasks(r: &Rank<'_>, threads: usize) -> Result<()> {
    let runtime = if threads == 0 {
        tokio::runtime::Builder::new_current_thread().enable_all().build()
    } else {
        tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()
    }
    .unwrap();
    let comm = r.comm.clone();
    runtime.block_on(async move {
        for _ in 0..3 {
            let tasks: Vec<_> = (0..16)
                .map(|k| {
                    let (w, comm) = (issue(&comm, k)?, comm.clone());
                    Ok(tokio::spawn(async move {
                        check(&comm, k, &w.await?);
                        Ok::<(), comm_core::Error>(())
                    }))
                })
                .collect::<Result<_>>()?;
            for t in tasks {
                t.await.unwrap()?;
            }
            // Beside each other in one task, and a timer that must not be needed.
            let (a, b, c) = (issue(&comm, 1)?, issue(&comm, 2)?, issue(&comm, 3)?);
            let all = async { tokio::join!(a, b, c) };
            let (a, b, c) = tokio::time::timeout(Duration::from_secs(30), all).await.expect("the futures ended");
            check(&comm, 1, &a?);
            check(&comm, 2, &b?);
            check(&comm, 3, &c?);
            // Messages, and a future that is dropped after it was polled.
            let (next, prev) = ((comm.rank() + 1) % comm.size(), (comm.rank() + comm.size() - 1) % comm.size());
            let inbound = comm.recv_async(vec![0u8; 200_000], prev)?;
            let outbound = comm.send_async(vec![comm.rank() as u8; 200_000], next)?;
            let mut polled = issue(&comm, 5)?;
            tokio::select! {
                biased;
                _ = &mut polled => {}
                () = std::future::ready(()) => {}
            }
            drop(polled);
            assert!(inbound.await?.iter().all(|x| *x == prev as u8));
            outbound.await?;
        }
        comm.barrier_async()?.await
    })
}
