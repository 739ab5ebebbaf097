package bench

import (
	"os"
	"slices"
)

// usage has the CPU time and the memory of a process.
type usage struct {
	cpu      float64 // seconds
	rss, hwm float64 // MiB: now, and the maximum so far
}

// meter measures the share of the machine that other processes use.
type meter struct {
	pids        []int
	busy, total float64
	own         map[int]float64
}

// startMeter starts a measurement. The listed processes and this one are not others.
func startMeter(pids ...int) *meter {
	meter := &meter{pids: slices.Concat([]int{os.Getpid()}, pids), own: map[int]float64{}}
	slices.Sort(meter.pids)
	meter.pids = slices.Compact(meter.pids)

	for _, pid := range meter.pids {
		meter.own[pid], _ = processTicks(pid)
	}
	meter.busy, meter.total, _ = machineTicks()
	return meter
}

// measureOtherCPU returns the share of the machine's CPU time that other processes used since the start, in percent
// of all cores. ok is false if the system does not report it, or a listed process has ended.
func (m *meter) measureOtherCPU() (pct float64, ok bool) {
	busy, total, ok := machineTicks()
	if !ok || total <= m.total {
		return 0, false
	}

	others := busy - m.busy
	for _, pid := range m.pids {
		now, ok := processTicks(pid)
		if !ok {
			return 0, false
		}
		others -= now - m.own[pid]
	}
	return 100 * max(others, 0) / (total - m.total), true
}

// measureUsed returns the CPU time of processes since the start, in seconds. Processes that startMeter did not get
// count as 0.
func (m *meter) measureUsed(pids ...int) (seconds float64) {
	for _, pid := range pids {
		if before, ok := m.own[pid]; ok {
			now, _ := processTicks(pid)
			seconds += max(now-before, 0)
		}
	}
	return seconds
}
