"""Confines a worker process, with whatever its system offers.

Two kinds of fence, of which either may be missing, for instance in a container:

  namespaces   no network, no process but the worker's own, and a file tree of
               its own: the programs' files, read-only, and a scratch folder in
               memory. Needs root's rights, or user namespaces for everybody.
  Landlock     of the files the same ones, no TCP, and no signals to processes
               outside. Needs no right, but Linux 5.13, for all of it 6.12.

Besides, a worker of root's becomes an unprivileged user where all may read its
programs. What does not work is left out and reported; nothing here raises.
"""

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import time
import types
from typing import NamedTuple

_SCRATCH_BYTES = 64 * 2**20
_SCRATCH_FILES = 4096
_MAX_FILE_BYTES = 2**20
_MAX_PROCESSES = 64  # Threads count.
_KILL_LIMIT_S = 0.8

_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 13, 1 << 14, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522

# System calls that libc has no name for; the same number on each architecture.
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = (
  *(444, 445, 446),
)
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1

# Landlock's rights to files, by the version that brought them.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE = 1 << 14
_TRUNCATE_SINCE = 3  # Before that, any file can be emptied.
_RIGHTS = (
  (1, (1 << 13) - 1),
  (2, 1 << 13),
  (_TRUNCATE_SINCE, _TRUNCATE),
  (5, 1 << 15),
)
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_TCP_SINCE, _BIND_AND_CONNECT = 4, 3
_SCOPES_SINCE, _ABSTRACT_SOCKETS_AND_SIGNALS = 6, 3

# Where the new file tree is put together: always there, and no program's files
# lie beneath it.
_SKELETON = "/sys"
_SCRATCH = "/.scratch"
_SYSTEM_PATHS = (
  *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"),
  *("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# systemd's range for users that exist only while their process does.
_FIRST_USER, _NUM_USERS = 61184, 4336


# No dataclass: importing those would double a worker's start-up time.
class Protections(NamedTuple):
  """What a worker cannot do (True), or can.

  Attributes:
    network: Reach a network, or a listener on this machine.
    tcp: Reach them over TCP.
    writes: Write to a file outside its scratch folder.
    reads: Read a file that is neither the system's, nor Python's, nor beneath
      an import path; look into a process outside.
    signals: Send a signal to a process outside.
    survivors: Leave a process behind, however it hides.
    processes: Run more than 64 processes and threads.
    disk: Fill more than 64 MiB of scratch folder.
    root: Be root.
  """

  network: bool = False
  tcp: bool = False
  writes: bool = False
  reads: bool = False
  signals: bool = False
  survivors: bool = False
  processes: bool = False
  disk: bool = False
  root: bool = False

  @property
  def isolated(self) -> bool:
    """Whether neither network nor files are open."""
    return self.network and self.writes and self.reads

  def __str__(self) -> str:
    fields = self._asdict()
    closed, open_ = (
      ", ".join(name for name in fields if fields[name] == value) or "nothing"
      for value in (True, False)
    )
    return f"closed to verifiers: {closed}; open: {open_}"


class _Process(types.SimpleNamespace):
  """What this process is.

  Attributes:
    parent: The process that asked for it.
    namespaces: Whether it has its own.
    owner: Whether those belong to it, rather than to root.
    user: Root's worker becomes this user; None: it stays who it is.
    scratch: The folder it was confined to; empty before that.
    alone: Whether all that it may signal are its descendants.
    children: A file that lists its children; None if there is none.
  """


_this = _Process(
  parent=0,
  namespaces=False,
  owner=False,
  user=None,
  scratch="",
  alone=False,
  children=None,
)


def supervise() -> int:
  """Goes on in a new process, which the old one watches over.

  The old process never returns. On SIGTERM, or when the new one ends, it kills
  whatever descends from it, and then ends as the new one did. Where the system
  offers it the new process has its own process numbers, and its own network
  with nothing in it. Call it before there are threads.

  Returns:
    The process that started the old one.
  """
  _limit(resource.RLIMIT_CORE, 0)
  if sys.platform != "linux":
    return os.getppid()
  # The death of the thread that started this is passed on.
  _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  _this.parent = os.getppid()
  with contextlib.suppress(OSError):  # Short of memory: this, not the trainer.
    _write("/proc/self/oom_score_adj", "1000")
  signals = {signal.SIGTERM, signal.SIGCHLD}
  signal.pthread_sigmask(signal.SIG_BLOCK, signals)
  _unshare()
  # A new user namespace has made Linux forget it.
  _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getuid() == 0 and not _this.owner:
    _this.user = _FIRST_USER + os.getpid() % _NUM_USERS
  supervisor, init = os.getpid(), None
  alive, held = os.pipe()
  if _this.namespaces:
    # The first child: when it dies, Linux kills all that share its numbers.
    init = os.fork()
    if init == 0:
      _take_in_orphans(alive)
  else:
    _adopt_orphans()
  worker = os.fork()
  if worker != 0:
    try:
      _watch(worker, init)
    finally:
      os._exit(os.EX_SOFTWARE)
  _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() not in (supervisor, 0):  # 0: in another namespace.
    os._exit(os.EX_UNAVAILABLE)
  os.setsid()  # Or what it sends to its group would reach its supervisor.
  os.close(alive)
  os.close(held)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
  return _this.parent


def confine() -> tuple[Protections, str]:
  """Gives up for good what no scorer needs.

  Call it in the process that ``supervise`` returned in, once everything is
  imported that writes caches or reads data. It leaves the process in an empty
  scratch folder, to which HOME and TMPDIR point.

  Returns:
    What is protected, and the scratch folder if somebody has to remove it.
  """
  paths = _program_paths()
  tree = _this.namespaces and _new_tree(paths)
  user = _this.user
  if user is not None:
    if _open_to_all(paths, new=tree) and _may_become(user):
      _become(user)
    else:
      user = None
  _this.scratch = folder = _SCRATCH if tree else _make_scratch()
  os.chdir(folder)
  os.umask(0o077)
  os.environ |= {"HOME": folder, "TMPDIR": folder}
  if "tempfile" in sys.modules:
    sys.modules["tempfile"].tempdir = folder
  _limit(resource.RLIMIT_FSIZE, _MAX_FILE_BYTES)
  if sys.platform != "linux":
    return Protections(root=os.getuid() != 0), folder
  _adopt_orphans()  # So that kill_descendants can wait for them, too.
  counted = user is not None or (
    _this.owner and os.getuid() != 0 and _linux() >= (5, 14)
  )
  if counted:
    _limit(resource.RLIMIT_NPROC, _MAX_PROCESSES)
  _drop_privileges()
  version = _landlock(["/"] if tree else paths, folder)
  _this.alone = _this.namespaces or user is not None
  protections = Protections(
    network=_this.namespaces,
    tcp=_this.namespaces or version >= _TCP_SINCE,
    writes=tree or version >= _TRUNCATE_SINCE,
    reads=tree or version > 0,
    signals=_this.alone or version >= _SCOPES_SINCE,
    survivors=_this.alone,
    processes=counted,
    disk=tree,
    root=os.getuid() != 0,
  )
  return protections, "" if tree else folder


def deny_signals() -> None:
  """Keeps this process from signalling any but its descendants (Landlock)."""
  if sys.platform == "linux" and _landlock_version() >= _SCOPES_SINCE:
    _restrict(_ruleset(0, 0, _ABSTRACT_SOCKETS_AND_SIGNALS))


def scratch() -> str:
  """The folder that this process was confined to; its own to empty.

  Raises:
    RuntimeError: If ``confine`` was not called in it.
  """
  if not _this.scratch:
    raise RuntimeError("This process is no confined worker of a verifier's.")
  return _this.scratch


def kill_descendants() -> bool:
  """Kills whatever this process has started, and what that has.

  It must own all of its children. Where ``Protections.survivors`` is False,
  those may escape that hide from it or fork faster than they are found.

  Returns:
    Whether all its children have ended.
  """
  deadline = time.monotonic() + _KILL_LIMIT_S
  while time.monotonic() < deadline:
    if _this.alone:
      _kill(-1)  # In one sweep, which no fork escapes.
    elif _this.user is not None and os.getuid() == 0:
      _sweep(_this.user)
    for child in _children():
      _kill(child)
    try:
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    except ChildProcessError:
      return True
    time.sleep(0.001)
  return False


# What supervises.


def _unshare() -> None:
  """Takes namespaces of its own: as root if it may, else as their owner."""
  flags = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC
  user, group = os.getuid(), os.getgid()
  if _libc().unshare(flags) == 0:
    _this.namespaces = True
  elif _libc().unshare(flags | _CLONE_NEWUSER) == 0:
    _this.namespaces = _this.owner = True
    with contextlib.suppress(OSError):  # Then it can mount nothing.
      _write("/proc/self/setgroups", "deny")
      _write("/proc/self/uid_map", f"{user} {user} 1")
      _write("/proc/self/gid_map", f"{group} {group} 1")


def _take_in_orphans(alive: int) -> None:
  """Is init of the namespace, until its parent no longer holds the pipe."""
  try:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Linux buries them.
    os.setsid()
    os.closerange(0, alive)
    os.closerange(alive + 1, 256)
    os.read(alive, 1)
  finally:
    os._exit(0)


def _adopt_orphans() -> None:
  """Becomes the parent of descendants without one, so that it finds them."""
  _prctl(_PR_SET_CHILD_SUBREAPER, 1)
  with contextlib.suppress(OSError):
    _this.children = os.open(
      f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY
    )


def _watch(worker: int, init: int | None) -> None:
  """Waits for the worker's end or SIGTERM, and ends this process."""
  os.closerange(0, 3)
  status = None
  while status is None:
    number = signal.sigwait({signal.SIGTERM, signal.SIGCHLD})
    if number == signal.SIGTERM:
      break
    done, code = os.waitpid(worker, os.WNOHANG)
    status = code if done else None
  if status is None:
    _kill(worker)
  if init is None:
    kill_descendants()
  else:
    if status is None:
      os.waitpid(worker, 0)  # Init cannot end before all others are buried.
    _kill(init)
    os.waitpid(init, 0)  # After it, all of its namespace is dead.
  if status is None or os.WIFSIGNALED(status):
    number = signal.SIGKILL if status is None else os.WTERMSIG(status)
    with contextlib.suppress(OSError):  # SIGKILL.
      signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
  os._exit(os.WEXITSTATUS(status))


def _sweep(user: int) -> None:
  """Kills all processes of a user who has none but a worker's."""
  killer = os.fork()
  if killer == 0:
    try:
      _become(user)
      _kill(-1)
    finally:
      os._exit(0)
  os.waitpid(killer, 0)


def _children() -> list[int]:
  if _this.children is None:
    return []
  text = os.pread(_this.children, 2**16, 0)
  return [int(word) for word in text.split()]


def _kill(process: int) -> None:
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.kill(process, signal.SIGKILL)


# What confines.


def _program_paths() -> list[str]:
  """What imports and programs may still need to read, none inside another."""
  modules = (
    os.path.dirname(module.__file__)
    for name, module in list(sys.modules.items())
    if "." not in name and getattr(module, "__file__", None)
  )
  libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
  wanted = {
    os.path.abspath(path)
    for path in (
      *_SYSTEM_PATHS,
      *(sys.prefix, sys.base_prefix, sys.exec_prefix),
      *sys.path,
      *libraries,
      *modules,
    )
    if path and os.path.exists(path)
  } - {"/"}  # Nobody keeps programs there, but everything lies beneath.
  paths: list[str] = []
  for path in sorted(wanted, key=lambda path: path.split(os.sep)):
    if not (paths and path.startswith(paths[-1] + os.sep)):
      paths.append(path)
  return paths


def _open_to_all(paths: list[str], *, new: bool) -> bool:
  """Whether the programs can be read by a user who owns nothing."""
  programs = [os.path.realpath(sys.executable), os.path.realpath(__file__)]
  if any(os.stat(program).st_mode & 0o4 == 0 for program in programs):
    return False
  if new:  # What leads to them was made so.
    return all(os.stat(path).st_mode & 0o4 for path in paths)
  above = {os.path.realpath(path) for path in paths}
  while not above <= {"/"}:
    if any(os.stat(path).st_mode & 0o5 == 0 for path in above):
      return False
    above = {os.path.dirname(path) for path in above}
  return True


def _new_tree(paths: list[str]) -> bool:
  """Changes to a file tree that holds only ``paths``, read-only, and scratch.

  Returns:
    Whether it could.
  """
  try:
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _SKELETON, "tmpfs", _MS_NOSUID, "mode=0755,size=4m")
  except OSError:
    return False
  try:
    for path in (*paths, *_DEVICES):
      _show(path)
    for folder in (_SCRATCH, "/proc"):
      os.mkdir(_SKELETON + folder)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
      os.symlink(f"/proc/self/fd/{number}", f"{_SKELETON}/dev/{name}")
    os.symlink("/proc/self/fd", f"{_SKELETON}/dev/fd")
    _make_read_only(_SKELETON)
    _mount(
      "tmpfs",
      _SKELETON + _SCRATCH,
      "tmpfs",
      _MS_NOSUID | _MS_NODEV,
      f"mode=0777,size={_SCRATCH_BYTES},nr_inodes={_SCRATCH_FILES}",
    )
    with contextlib.suppress(OSError):  # Containers often forbid this one.
      flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
      _mount("proc", _SKELETON + "/proc", "proc", flags)
    os.chdir(_SKELETON)
    _mount(".", "/", "", _MS_MOVE)
  except OSError:
    _libc().umount2(_SKELETON.encode(), _MNT_DETACH)
    return False
  os.chroot(".")
  return True


def _show(path: str) -> None:
  """Binds ``path`` into the new tree, where it has the same name."""
  target = _SKELETON + path
  os.makedirs(os.path.dirname(target), exist_ok=True)
  if os.path.islink(path) and os.path.dirname(path) == "/":
    os.symlink(os.readlink(path), target)  # As /lib leads to usr/lib.
    return
  if os.path.isdir(path):
    os.mkdir(target)
  else:
    os.close(os.open(target, os.O_CREAT))
  _mount(path, target, "", _MS_BIND | _MS_REC)


def _make_scratch() -> str:
  import tempfile  # Slow to import, and most workers need none.

  return tempfile.mkdtemp(prefix="darl-verifier-")


def _become(user: int) -> None:
  os.setgroups([])
  os.setresgid(user, user, user)
  os.setresuid(user, user, user)


def _may_become(user: int) -> bool:
  """Whether ``_become`` works; tried in a way that can be taken back."""
  try:
    os.setgroups([])
    os.setegid(user)
    os.setegid(0)
    os.seteuid(user)
    os.seteuid(0)
  except OSError:
    return False
  return True


def _drop_privileges() -> None:
  """Gives up all capabilities, for whatever it starts, too."""
  header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
  _libc().capset(header, bytes(24))
  _prctl(_PR_SET_NO_NEW_PRIVS, 1)
  # Its own children cannot read its memory, which holds the right answers.
  _prctl(_PR_SET_DUMPABLE, 0)


def _landlock(paths: list[str], scratch: str) -> int:
  """Restricts this process to these files, and to no TCP and no signals.

  Returns:
    The version of Landlock; 0 if it does not hold for the whole process.
  """
  version = _landlock_version()
  if version <= 0:
    return 0
  files = sum(rights for since, rights in _RIGHTS if version >= since)
  ruleset = _ruleset(
    files,
    _BIND_AND_CONNECT if version >= _TCP_SINCE else 0,
    _ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPES_SINCE else 0,
  )
  for path in paths:
    _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR)
  for path in _DEVICES:
    _allow(ruleset, path, files & (_READ_FILE | _WRITE_FILE | _TRUNCATE))
  _allow(ruleset, scratch, files)
  # It binds one thread, and those that this one starts from now on.
  threads = len(os.listdir("/proc/self/task")) if _has_proc() else 1
  return version if _restrict(ruleset) and threads == 1 else 0


def _landlock_version() -> int:
  return _libc().syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)


def _ruleset(files: int, network: int, scopes: int) -> int:
  # Older kernels know less of the structure.
  size = 24 if scopes else 16 if network else 8
  attributes = struct.pack("=QQQ", files, network, scopes)
  return _libc().syscall(
    _LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0
  )


def _allow(ruleset: int, path: str, rights: int) -> None:
  try:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
  except OSError:
    return  # What is not there needs no right.
  if not os.path.isdir(path):
    rights &= _FILE_RIGHTS
  rule = struct.pack("=Qi", rights, place)
  _libc().syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_PATH_BENEATH, rule, 0)
  os.close(place)


def _restrict(ruleset: int) -> bool:
  done = _libc().syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
  if ruleset >= 0:
    os.close(ruleset)
  return done


def _make_read_only(path: str) -> None:
  """Makes all that is mounted at and beneath ``path`` read-only."""
  attributes = struct.pack(
    "=QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0
  )
  done = _libc().syscall(
    _MOUNT_SETATTR,
    _AT_FDCWD,
    path.encode(),
    _AT_RECURSIVE,
    attributes,
    ctypes.c_size_t(len(attributes)),
  )
  if done != 0:
    raise OSError(ctypes.get_errno(), "mount_setattr")


def _mount(
  source: str, target: str, kind: str, flags: int, data: str = ""
) -> None:
  done = _libc().mount(
    source.encode(),
    target.encode(),
    kind.encode() or None,
    ctypes.c_ulong(flags),
    data.encode() or None,
  )
  if done != 0:
    raise OSError(ctypes.get_errno(), f"mount {source} at {target}")


def _limit(which: int, value: int) -> None:
  """Lowers a limit for good."""
  _, hard = resource.getrlimit(which)
  if hard != resource.RLIM_INFINITY:
    value = min(value, hard)
  resource.setrlimit(which, (value, value))


def _has_proc() -> bool:
  return os.path.exists("/proc/self/task")


def _linux() -> tuple[int, ...]:
  """The kernel's version, as (major, minor)."""
  major, minor = os.uname().release.split(".")[:2]
  return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _prctl(option: int, value: int) -> None:
  _libc().prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def _libc() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def _write(path: str, text: str) -> None:
  with open(path, "w") as file:
    file.write(text)
