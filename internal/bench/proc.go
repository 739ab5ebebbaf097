package bench

import (
	"os"
	"slices"
)

// usage is what a process has used and holds.
type usage struct {
	cpu      float64 // seconds
	rss, hwm float64 // MiB: now, and at most so far
}

// meter finds out what part of the machine somebody else used.
type meter struct {
	pids        []int
	busy, total float64
	own         map[int]float64
}

// startMeter begins a stretch in which the processes pids, and this one, are not foreign.
func startMeter(pids ...int) *meter {
	m := &meter{pids: slices.Concat([]int{os.Getpid()}, pids), own: map[int]float64{}}
	slices.Sort(m.pids)
	m.pids = slices.Compact(m.pids)
	for _, pid := range m.pids {
		m.own[pid], _ = processTicks(pid)
	}
	m.busy, m.total, _ = machineTicks()
	return m
}

// foreign is the share of the machine's CPU time, in per cent of all cores, that others used since the start. It is not
// known where the machine does not tell, or when one of the processes has ended.
func (m *meter) foreign() (pct float64, ok bool) {
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

// used is the CPU time of processes since the start, in seconds; 0 for those that were not named then.
func (m *meter) used(pids ...int) (seconds float64) {
	for _, pid := range pids {
		if before, ok := m.own[pid]; ok {
			now, _ := processTicks(pid)
			seconds += max(now-before, 0)
		}
	}
	return seconds
}
