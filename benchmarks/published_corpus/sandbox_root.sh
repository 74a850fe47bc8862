# Root of a sandbox: run in new namespaces as `bash sandbox_root.sh ROOT INPUT`, then the job in it.
# ROOT is an empty folder, INPUT has the folders `job` (the repository), `over` (changed files), `stubs` and the file
# `start`. Writes a tar archive of the records to its output. Nothing of the host can be written: /usr is bound
# read-only, all else is memory, and the job has no rights left to change that.
set -e
root=$1 input=$2
mount --make-rprivate /
mount -t tmpfs -o size=512m,mode=755 none "$root"
cd "$root"
mkdir usr etc dev proc tmp home home/user data record job old dev/shm
mount --rbind /usr usr
mount -o remount,bind,ro usr
for one in bin sbin lib lib32 lib64; do
  if [ -L "/$one" ]; then
    cp -d "/$one" .
  elif [ -d "/$one" ]; then
    mkdir "$one"
    mount --bind "/$one" "$one"
    mount -o remount,bind,ro "$one"
  fi
done
cp -rd /etc/alternatives /etc/ld.so.cache etc/ 2> /dev/null || true
cp -L /etc/localtime etc/ 2> /dev/null || true
echo "user:x:0:0::/home/user:/bin/bash" > etc/passwd
echo "user:x:0:" > etc/group
for one in null zero full random urandom; do
  touch "dev/$one"
  mount --bind "/dev/$one" "dev/$one"
done
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
# Some files of /proc act on the whole machine.
mount -t proc proc proc
mount -o remount,bind,ro proc
cp -r "$input/job/." job/
cp -r "$input/over/." job/
cp "$input/start" start
mount -t tmpfs -o size=4m none usr/local
mkdir usr/local/bin
cp -d "$input/stubs/." usr/local/bin/ -r
# A script that puts /usr/bin first must not find another Python.
for one in usr/local/bin/*; do
  [ ! -L "$one" ] || [ ! -e "usr/bin/${one##*/}" ] || mount --bind usr/local/bin/recorder "usr/bin/${one##*/}"
done
pivot_root . old
cd /
umount -l old
rmdir old
ulimit -t 30 -f 200000 -v 4000000
setpriv --bounding-set=-all --inh-caps=-all --no-new-privs bash /start > /dev/null 2> /record/errors < /dev/null || true
# Commands in the background may still start.
for _ in {1..100}; do
  left=(/proc/[0-9]*)
  [ ${#left[@]} -gt 1 ] || break
  /usr/bin/sleep 0.02
done
# A script may send its errors to a file of its own.
find / -xdev -type f -newer /start -size -1000k ! -path '/record/*' -exec grep -ahE ': line [0-9]+: ' {} + \
  >> /record/errors || true
tar -C /record -c .
