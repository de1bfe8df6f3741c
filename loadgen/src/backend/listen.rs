//! Listening with an end that can be relied on: after `stop` the port refuses and
//! no connection is left, which tests of a backend outage need.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};

/// Room for a burst of connections that all arrive before the first is accepted.
const BACKLOG: u32 = 4096;

/// How long to wait when the process is out of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(10);

/// A listener with its connections. Ends when stopped or dropped.
pub(crate) struct Server {
    addr: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Server {
    /// Binds `addr` and runs `connection` for every connection accepted there.
    pub(crate) fn start<F, C>(addr: SocketAddr, connection: F) -> anyhow::Result<Self>
    where
        F: Fn(TcpStream) -> C + Send + 'static,
        C: Future<Output = ()> + Send + 'static,
    {
        let listener = bind(addr).with_context(|| format!("cannot listen on {addr}"))?;
        let addr = listener.local_addr()?;
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(accept(listener, stopped, connection));
        Ok(Self { addr, stop, task })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) async fn stop(self) {
        drop(self.stop);
        // An error here is a panic in the accept loop, which has closed everything too.
        let _ = self.task.await;
    }
}

fn bind(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = match addr {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // Connections of an earlier run that linger in TIME_WAIT do not hold the port.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(BACKLOG)
}

async fn accept<F, C>(listener: TcpListener, stopped: oneshot::Receiver<()>, connection: F)
where
    F: Fn(TcpStream) -> C,
    C: Future<Output = ()> + Send + 'static,
{
    let mut stopped = pin!(stopped);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            // The sender is never used, only dropped.
            _ = &mut stopped => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    // Small frames must not wait for an acknowledgement. A socket
                    // that refuses the option is closed already.
                    let _ = stream.set_nodelay(true);
                    connections.spawn(connection(stream));
                }
                Err(_) => tokio::time::sleep(ACCEPT_RETRY).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
    drop(listener);
    connections.shutdown().await;
}
