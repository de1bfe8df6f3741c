//! Starts the tests' origin server and a cache in front of it.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use collapser_loadgen::sidecar::{Sidecar, SidecarOptions, free_port};
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::Cache;

/// How long a server may take to listen.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Where Debian has servers, which is not in everybody's PATH.
const SBIN: &str = "/usr/sbin";

/// The tests' own origin server.
pub struct Origin {
    server: Server,
}

impl Origin {
    /// Starts it on a free port.
    ///
    /// # Errors
    /// If the tests are not there.
    pub async fn start(tests: &Path) -> anyhow::Result<Self> {
        let script = tests.join("package/server/server.mjs");
        ensure!(script.is_file(), "the tests are missing at {}; run: make http-cache-tests", tests.display());
        let dir = TempDir::new()?;
        let mut command = Command::new("node");
        // It takes its options as npm hands them to scripts.
        let addr = free_addr()?;
        command.env("npm_config_protocol", "http").env("npm_config_port", addr.port().to_string());
        command.env("npm_config_pidfile", dir.path().join("pid")).arg(script);
        Ok(Self { server: Server::start(command, addr, dir).await.context("the tests' origin server")? })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.server.addr
    }
}

/// Says how to get a cache that is not there.
///
/// # Errors
/// If it is not.
pub fn require(cache: Cache) -> anyhow::Result<()> {
    let (program, package) = match cache {
        Cache::Collapser => return Ok(()),
        Cache::Nginx => ("nginx", "nginx"),
        Cache::Varnish => ("varnishd", "varnish"),
    };
    find(program)
        .map(drop)
        .with_context(|| format!("{program} is missing; on Debian: apt-get install {package}"))
}

/// A cache in front of the origin server. Dropping it stops it.
pub struct Proxy {
    name: String,
    kind: Running,
}

enum Running {
    Envoy(Sidecar),
    Other(Server),
}

impl Proxy {
    /// Starts it on a free port.
    ///
    /// # Errors
    /// If it does not start; with its own words.
    pub async fn start(cache: Cache, root: &Path, origin: SocketAddr) -> anyhow::Result<Self> {
        let configs = root.join("benches/http-cache");
        match cache {
            Cache::Collapser => {
                let gateway =
                    Sidecar::start(SidecarOptions::gateway(root, origin)).await.context("the gateway")?;
                Ok(Self { name: "Collapser".to_owned(), kind: Running::Envoy(gateway) })
            }
            Cache::Nginx => nginx(&configs, origin).await.context("nginx"),
            Cache::Varnish => varnish(&configs, origin).await.context("Varnish"),
        }
    }

    /// Its name and version.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it takes requests.
    pub fn uri(&self) -> String {
        match &self.kind {
            Running::Envoy(gateway) => gateway.uri(),
            Running::Other(server) => format!("http://{}", server.addr),
        }
    }
}

async fn nginx(configs: &Path, origin: SocketAddr) -> anyhow::Result<Proxy> {
    let (addr, dir) = (free_addr()?, TempDir::new()?);
    let places = [
        ("DIR", dir.path().display().to_string()),
        ("LISTEN", addr.to_string()),
        ("ORIGIN", origin.to_string()),
    ];
    let config = filled(&configs.join("nginx.conf"), dir.path(), &places)?;
    let program = find("nginx").context("nginx is missing")?;
    // nginx/1.22.1
    let name = format!("nginx {}", version(&program, "-v", "nginx/")?);
    let mut command = Command::new(program);
    command.arg("-c").arg(config).arg("-p").arg(dir.path()).arg("-e").arg(dir.path().join("nginx.log"));
    Ok(Proxy { name, kind: Running::Other(Server::start(command, addr, dir).await?) })
}

async fn varnish(configs: &Path, origin: SocketAddr) -> anyhow::Result<Proxy> {
    let (addr, dir) = (free_addr()?, TempDir::new()?);
    let places = [("ORIGIN_HOST", origin.ip().to_string()), ("ORIGIN_PORT", origin.port().to_string())];
    let config = filled(&configs.join("varnish.vcl"), dir.path(), &places)?;
    let program = find("varnishd").context("varnishd is missing")?;
    // varnishd (varnish-7.1.1 revision ...)
    let name = format!("Varnish {}", version(&program, "-V", "varnish-")?);
    let mut command = Command::new(program);
    command.args(["-F", "-j", "none", "-T", "none", "-s", "malloc,64m", "-a", &addr.to_string()]);
    command.args(["-t", "0", "-p", "default_keep=60", "-p", "backend_idle_timeout=4"]);
    command.arg("-n").arg(dir.path().join("varnish")).arg("-f").arg(config);
    Ok(Proxy { name, kind: Running::Other(Server::start(command, addr, dir).await?) })
}

/// The configuration with its places filled in.
fn filled(template: &Path, dir: &Path, places: &[(&str, String)]) -> anyhow::Result<PathBuf> {
    let mut text =
        fs::read_to_string(template).with_context(|| format!("cannot read {}", template.display()))?;
    for (name, value) in places {
        text = text.replace(&format!("@{name}@"), value);
    }
    let file = dir.join(template.file_name().context("no file")?);
    fs::write(&file, text)?;
    Ok(file)
}

/// What follows `prefix` in what a program says of its version.
fn version(program: &Path, flag: &str, prefix: &str) -> anyhow::Result<String> {
    let said = Command::new(program).arg(flag).output()?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned() + &String::from_utf8_lossy(&said.stderr);
    let rest = said.split_once(prefix).with_context(|| format!("no version in: {said}"))?.1;
    Ok(rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect())
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from(SBIN)]);
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

fn free_addr() -> anyhow::Result<SocketAddr> {
    let loopback = Ipv4Addr::LOCALHOST;
    Ok(SocketAddr::from((loopback, free_port(loopback.into())?)))
}

/// A server process with a folder of its own. Dropping it stops it as a service is stopped, since both nginx and
/// Varnish have children that would outlive them otherwise.
struct Server {
    child: Child,
    addr: SocketAddr,
    dir: TempDir,
}

impl Server {
    async fn start(mut command: Command, addr: SocketAddr, dir: TempDir) -> anyhow::Result<Self> {
        let log = fs::File::create(dir.path().join("output"))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot run {}", command.get_program().display()))?;
        let mut server = Self { child, addr, dir };
        server.wait_until_listening().await?;
        Ok(server)
    }

    async fn wait_until_listening(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(self.addr).await.is_err() {
            let ended = self.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let said = fs::read_to_string(self.dir.path().join("output")).unwrap_or_default();
                bail!("it did not start: {said}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        // Both fail only if it ends just now.
        let _ = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        let _ = self.child.wait();
    }
}
