package bench

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// ticksPerSecond is USER_HZ, which is 100 on every platform that Go runs on.
const ticksPerSecond = 100

// processUsage reads the CPU time and memory that a process has used. CPU time comes from the
// scheduler's nanoseconds, because a drain uses less than a second and the clock ticks of
// /proc/<pid>/stat are 10 ms.
func processUsage(pid int) (usage, bool) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return usage{}, false
	}

	usage := usage{rss: statusMB(status, "VmRSS:"), hwm: statusMB(status, "VmHWM:")}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	for _, t := range tasks {
		content, err := os.ReadFile(t)
		if err != nil {
			// The thread has just ended.
			continue
		}

		ns, _, _ := strings.Cut(string(content), " ")
		n, _ := strconv.ParseInt(ns, 10, 64)
		usage.cpu += float64(n) / 1e9
	}

	// This kernel has no schedstats.
	if usage.cpu == 0 {
		usage.cpu, _ = processTicks(pid)
	}
	return usage, true
}

func statusMB(status []byte, name string) float64 {
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte(name)); ok {
			fields := strings.Fields(string(rest))
			kb, _ := strconv.ParseFloat(fields[0], 64)
			return kb / 1024
		}
	}
	return 0
}

// processTicks is the CPU time of a process, threads that have ended included, in seconds.
func processTicks(pid int) (float64, bool) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	_, rest, ok := strings.Cut(string(content[bytes.LastIndexByte(content, ')')+1:]), " ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 13 {
		return 0, false
	}
	user, _ := strconv.ParseFloat(fields[11], 64)
	system, _ := strconv.ParseFloat(fields[12], 64)
	return (user + system) / ticksPerSecond, true
}

// machineTicks are the CPU seconds of all cores that were not idle, and all of them. Time stolen by a
// hypervisor counts as busy: somebody else had it.
func machineTicks() (busy, total float64, ok bool) {
	content, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, false
	}

	line, _, _ := strings.Cut(string(content), "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 {
		return 0, 0, false
	}

	for i, s := range fields[1:9] {
		value, _ := strconv.ParseFloat(s, 64)
		total += value / ticksPerSecond
		// The two other fields are idle time, and time of waiting for a disk.
		if i != 3 && i != 4 {
			busy += value / ticksPerSecond
		}
	}
	return busy, total, true
}

// listeners finds the processes of this machine that listen on the ports of addresses on loopback, as far as
// they may be looked at: servers that were given by address are not others either.
func listeners(addrs []string) []int {
	// The files of the kernel have ports in hexadecimal digits.
	want := map[string]bool{}
	for _, a := range addrs {
		host, port, err := net.SplitHostPort(a)
		n, perr := strconv.Atoi(port)
		ip := net.ParseIP(host)
		if err == nil && perr == nil && (host == "localhost" || ip != nil && ip.IsLoopback()) {
			want[strings.ToUpper(hex.EncodeToString([]byte{byte(n >> 8), byte(n)}))] = true
		}
	}

	// A socket is found by its inode.
	inodes := map[string]bool{}
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		content, _ := os.ReadFile(file)
		for line := range strings.Lines(string(content)) {
			fields := strings.Fields(line)
			const listening = "0A"
			if len(fields) < 10 || fields[3] != listening {
				continue
			}
			if _, port, ok := strings.Cut(fields[1], ":"); ok && want[port] {
				inodes["socket:["+fields[9]+"]"] = true
			}
		}
	}

	if len(inodes) == 0 {
		return nil
	}

	// Each process links the sockets that it has open. A process with several of them counts once.
	seen := map[int]bool{}
	var pids []int
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, l := range links {
		to, err := os.Readlink(l)
		if err != nil || !inodes[to] {
			continue
		}
		pid, _ := strconv.Atoi(strings.Split(l, "/")[2])
		if !seen[pid] {
			seen[pid] = true
			pids = append(pids, pid)
		}
	}
	return pids
}
