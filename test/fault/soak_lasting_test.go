//go:build unix

package fault

import (
	"strconv"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/test/kit"
)

// lasting is the relay that runs through all eras.
type lasting struct {
	*kit.Scene
	t       *testing.T
	topics  *kit.Topics
	relay   *kit.Process
	load    *kit.RunningLoad
	figures []figures // one for each era
}

// figures are what must stay flat.
type figures struct{ memory, goroutines, descriptors int64 }

func newLasting(t *testing.T, stack *devstack.Stack) *lasting {
	t.Helper()
	l := &lasting{Scene: kit.New(t, kit.Options{Stack: stack, Replicas: countReplicas(stack)}), t: t}
	l.topics = l.ReadTopics()
	l.relay = l.StartRelay()
	l.relay.WaitTookOver()
	l.load = l.StartLoad(kit.Load{Rate: 5, Tolerant: true})
	return l
}

// The bounds of the figures at any time. A relay with one outbox needs a quarter of them.
const (
	mostMemory      = 160 << 20
	mostGoroutines  = 400
	mostDescriptors = 200
	// warmUpEras is how many eras show the needs of a relay. Afterwards it may need half as much again.
	warmUpEras = 3
)

// measure reads the figures after an era, and waits until everything that was committed is delivered.
func (l *lasting) measure() {
	l.t.Helper()
	l.WaitDelivered(l.topics, "order")
	_, metrics := l.relay.Get("/metrics")
	now := figures{memory: readMetric(metrics, "process_resident_memory_bytes"), goroutines: readMetric(metrics, "go_goroutines"), descriptors: readMetric(metrics, "process_open_fds")}
	l.figures = append(l.figures, now)

	l.t.Logf("after era %d: %d MiB, %d goroutines, %d descriptors", len(l.figures)-1, now.memory>>20, now.goroutines, now.descriptors)
	if now.memory > mostMemory || now.goroutines > mostGoroutines || now.descriptors > mostDescriptors || now.goroutines == 0 {
		l.t.Errorf("figures out of bounds: %+v", now)
	}
	if len(l.figures) <= warmUpEras {
		return
	}

	var first figures
	for _, f := range l.figures[:warmUpEras] {
		first = figures{max(first.memory, f.memory), max(first.goroutines, f.goroutines), max(first.descriptors, f.descriptors)}
	}
	if now.memory > first.memory*3/2+16<<20 || now.goroutines > first.goroutines*3/2+20 || now.descriptors > first.descriptors*3/2+20 {
		l.t.Errorf("the figures grow: %+v, at most %+v in the first %d eras", now, first, warmUpEras)
	}
}

// finish checks the deliveries of all eras.
func (l *lasting) finish() {
	l.t.Helper()
	l.load.Stop()
	l.t.Logf("the relay that runs through all eras: %s; %d appends failed", l.CheckDelivery(l.topics), l.load.CountFailed())
	l.relay.Terminate()
	if code := l.relay.WaitExit(); code != 0 {
		l.t.Errorf("exit code %d after SIGTERM", code)
	}
}

// readMetric returns the value of a metric without labels, or 0.
func readMetric(text, name string) int64 {
	for line := range strings.Lines(text) {
		if value, found := strings.CutPrefix(line, name+" "); found {
			n, _ := strconv.ParseFloat(strings.TrimSpace(value), 64)
			return int64(n)
		}
	}
	return 0
}
