package demo

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/devstack"
)

var slotsScenario = Scenario{
	Name:    "slots",
	Promise: "a watcher is divided into two slots that two nodes share, while nodes join, leave and die: nothing is lost, repeated or out of order, and two drain faster than one",
	events:  40_000, rate: 400,
	run: runSlots,
}

// roundTrip is how far the replica set is from the relays, there and back, where one stream is bound by that: it asks for the next
// reply, of 2,000 events at the most, when it has the last one.
const roundTrip = 60 * time.Millisecond

// SlotsFinding is what scenario slots found.
type SlotsFinding struct {
	Outcome
	// The rates are those of a backlog, in events a second. The first two are with the replica set some way off, so that a slot
	// waits for replies; the others with all servers and relays beside each other on this machine, whose processors they share.
	OneSlotEPS  float64 `json:"one_slot_eps"`
	TwoSlotEPS  float64 `json:"two_slot_eps"` // two slots, in two processes
	RoundTripMS int64   `json:"round_trip_ms"`
	OneNearEPS  float64 `json:"one_slot_near_eps"`
	TwoNearEPS  float64 `json:"two_slot_near_eps"`
	Processors  int     `json:"processors"`
	ResliceS    float64 `json:"reslice_s"` // what it took to divide the watcher
	Handovers   int     `json:"handovers"` // of a slot, while nodes joined, left and died
	SharedS     float64 `json:"shared_s"`  // the longest time until a node that had joined had its slot
}

func (f *SlotsFinding) describeFigures() []string {
	gain := func(one, two float64) float64 {
		if one <= 0 {
			return 0
		}
		return 100 * (two/one - 1)
	}
	return []string{
		fmt.Sprintf("replica set away  one slot %s events a second, two slots %s (%+.0f %%): %d ms for each reply of a stream is the limit of a slot",
			formatThousands(int(f.OneSlotEPS)), formatThousands(int(f.TwoSlotEPS)), gain(f.OneSlotEPS, f.TwoSlotEPS), f.RoundTripMS),
		fmt.Sprintf("replica set here  one slot %s events a second, two slots %s (%+.0f %%): servers, relays and consumer share %d processors, and those are the limit",
			formatThousands(int(f.OneNearEPS)), formatThousands(int(f.TwoNearEPS)), gain(f.OneNearEPS, f.TwoNearEPS), f.Processors),
		fmt.Sprintf("divided           in %.1f s, the drain and the fence included", f.ResliceS),
		fmt.Sprintf("shared            %d hand-overs; a node that joined had its slot after %.1f s at the most", f.Handovers, f.SharedS),
	}
}

func runSlots(ctx context.Context, s *stage) (Finding, error) {
	f := &SlotsFinding{RoundTripMS: roundTrip.Milliseconds(), Processors: runtime.NumCPU()}
	members := s.stack.Mongods()
	if len(members) != 1 {
		return f, fmt.Errorf("scenario slots needs a replica set of one member, this one has %d: unset %s, and one is started", len(members), devstack.EnvMongoDB)
	}
	way, err := newDelayProxy(members[0].Addr(), roundTrip/2)
	if err != nil {
		return f, err
	}
	defer way.closeAll()
	uri, err := proxyURI(s.stack.MongoURI(), way.listenAddress())
	if err != nil {
		return f, err
	}
	far := []string{"--set", "mongodb.uri=" + uri}
	if f.OneNearEPS, _, err = s.measureSlots(ctx, 1, nil, true); err != nil {
		return f, err
	}
	if f.OneSlotEPS, _, err = s.measureSlots(ctx, 1, far, true); err != nil {
		return f, err
	}
	began := time.Now()
	if err := s.runCommand(ctx, "reslice", "--slots", "2", "--yes"); err != nil {
		return f, err
	}
	f.ResliceS = roundSeconds(time.Since(began))
	s.printEvent("the watcher has two slots, %.1f s later", f.ResliceS)
	if f.TwoSlotEPS, _, err = s.measureSlots(ctx, 2, far, true); err != nil {
		return f, err
	}
	var nodes []*relay
	if f.TwoNearEPS, nodes, err = s.measureSlots(ctx, 2, nil, false); err != nil {
		return f, err
	}
	if err := s.comeAndGo(ctx, f, nodes[0], nodes[1]); err != nil {
		return f, err
	}
	if f.TwoSlotEPS <= f.OneSlotEPS && s.options.Events >= s.scenario.events { // a few replies tell nothing
		s.recordBroken("two slots drain %.0f events/s, one %.0f", f.TwoSlotEPS, f.OneSlotEPS)
	}
	return f, nil
}

// proxyURI is the address of a replica set of one member, reached by way of another address: nothing of it may lead back there.
func proxyURI(uri, way string) (string, error) {
	u, err := url.Parse(uri)
	if err != nil {
		return "", errors.New("the address of MongoDB is no URL") // the error repeats it, with its password
	}
	q := u.Query()
	q.Del("replicaSet")
	q.Set("directConnection", "true")
	u.Host, u.Path, u.RawQuery = way, cmp.Or(u.Path, "/"), q.Encode()
	return u.String(), nil
}

// measureSlots starts as many nodes as there are slots, has them drain a backlog, and ends them if they are not needed any more.
func (s *stage) measureSlots(ctx context.Context, slots int, set []string, end bool) (eps float64, nodes []*relay, err error) {
	s.relays.extraArgs = append([]string{"--set", "slots=" + strconv.Itoa(slots)}, set...)
	for range slots {
		x, err := s.relays.startRelay()
		if err != nil {
			return 0, nil, err
		}
		nodes = append(nodes, x)
	}
	if err := s.awaitShared(ctx, nodes...); err != nil {
		return 0, nodes, err
	}
	if eps, err = s.measureBacklog(ctx, nodes...); err != nil {
		return 0, nodes, err
	}
	where := ""
	if set != nil {
		where = fmt.Sprintf(", with the replica set %v away", roundTrip)
	}
	s.printEvent("%d of %d slots in as many processes drain %s events/s%s", slots, slots, formatThousands(int(eps)), where)
	for _, x := range nodes {
		if end {
			s.stopAndWait(x)
		}
	}
	return eps, nodes, nil
}

// comeAndGo lets nodes join, leave and die under a load.
func (s *stage) comeAndGo(ctx context.Context, f *SlotsFinding, a, b *relay) error {
	before, err := s.sumEpochs(ctx)
	if err != nil {
		return err
	}
	l, err := s.startLoad(ctx, aggregate, "walk-in", s.options.Rate, 0)
	if err != nil {
		return err
	}
	for round := range 2 {
		s.printEvent("%s leaves", b.node)
		s.stopAndWait(b)
		if err := s.awaitShared(ctx, a, a); err != nil {
			return err
		}
		if b, err = s.joinNode(ctx, f, a); err != nil {
			return err
		}
		s.printEvent("%s is killed", a.node)
		a.markExpected()
		if err := a.prog.Kill(); err != nil {
			return err
		}
		if err := s.awaitShared(ctx, b, b); err != nil {
			return err
		}
		if a, err = s.joinNode(ctx, f, b); err != nil {
			return err
		}
		if err := s.runFor(ctx, time.Duration(1+round)*time.Second); err != nil {
			return err
		}
	}
	if err := l.finishLoad(true); err != nil {
		return err
	}
	after, err := s.sumEpochs(ctx)
	f.Handovers = after - before
	if err != nil {
		return err
	}
	return s.awaitArrival(ctx)
}

// joinNode starts a node beside another and waits until each has a slot.
func (s *stage) joinNode(ctx context.Context, f *SlotsFinding, other *relay) (*relay, error) {
	began := time.Now()
	x, err := s.relays.startRelay()
	if err != nil {
		return nil, err
	}
	if err := s.awaitShared(ctx, other, x); err != nil {
		return nil, err
	}
	took := roundSeconds(time.Since(began))
	f.SharedS = max(f.SharedS, took)
	s.printEvent("%s has joined and has a slot, after %.1f s", x.node, took)
	return x, nil
}

// readWatchers is what the watcher documents say.
func (s *stage) readWatchers(ctx context.Context) []admin.Watcher {
	st, err := admin.ReadStatus(ctx, s.stateDatabase())
	if err != nil {
		return nil // it is asked again
	}
	return st.Watchers
}

func (s *stage) sumEpochs(ctx context.Context) (n int, err error) {
	st, err := admin.ReadStatus(ctx, s.stateDatabase())
	for _, w := range st.Watchers {
		n += int(w.Epoch)
	}
	return n, err
}

// awaitShared waits until each of those runs a slot, one that is named twice two, and nobody else any.
func (s *stage) awaitShared(ctx context.Context, nodes ...*relay) error {
	var want []string
	for _, x := range nodes {
		want = append(want, x.node)
	}
	slices.Sort(want)
	return s.awaitCondition(ctx, "each of "+strings.Join(want, " and ")+" has a slot", patience, func() bool {
		var got []string
		for _, w := range s.readWatchers(ctx) {
			if w.Owner != "" && w.State == "live" {
				got = append(got, w.Node)
			}
		}
		slices.Sort(got)
		return slices.Equal(got, want)
	})
}

// measureBacklog appends events while the watcher is paused, and measures how fast those relays drain it: from the first tenth to the
// last, by what Kafka has acknowledged.
func (s *stage) measureBacklog(ctx context.Context, relays ...*relay) (eps float64, err error) {
	times := 2 // the better one counts: other work on this machine only ever makes it slower
	if s.options.Events < s.scenario.events {
		times = 1 // so few tell nothing of a rate
	}
	for range times {
		once, err := s.drainOnce(ctx, relays)
		if err != nil {
			return 0, err
		}
		eps = max(eps, once)
	}
	return eps, nil
}

func (s *stage) drainOnce(ctx context.Context, relays []*relay) (eps float64, err error) {
	op := admin.Operator{State: s.stateDatabase(), Watcher: watcher, Actor: "dev"}
	if err := op.Pause(ctx); err != nil {
		return 0, err
	}
	owned := func() bool {
		return slices.ContainsFunc(s.readWatchers(ctx), func(w admin.Watcher) bool { return w.Owner != "" })
	}
	if err := s.awaitCondition(ctx, "the watcher is paused", patience, func() bool { return !owned() }); err != nil {
		return 0, err
	}
	n := s.options.Events
	l, err := s.startLoad(ctx, aggregate, "customer", s.options.Rate, n, appendInBulk)
	if err != nil {
		return 0, err
	}
	before, _ := s.check.Progress()
	if err := s.awaitCondition(ctx, "the backlog is appended", 2*patience, func() bool { done, _ := s.check.Progress(); return done-before >= n }); err != nil {
		return 0, err
	}
	if err := l.finishLoad(false); err != nil {
		return 0, err
	}
	start := s.sumAcked(ctx, relays)
	if err := op.Resume(ctx); err != nil {
		return 0, err
	}
	rate := drainRate{size: float64(n), from: time.Now()}
	looked := time.Time{}
	err = s.awaitCondition(ctx, "the backlog is drained", 2*patience, func() bool {
		if time.Since(looked) < 5*lookEvery {
			return false // a scrape costs what is measured
		}
		looked = time.Now()
		return rate.addSample(s.sumAcked(ctx, relays)-start, time.Now())
	})
	if err != nil {
		return 0, err
	}
	return rate.eventsPerSecond(), s.awaitArrival(ctx)
}

// drainRate is how fast a backlog goes, from looks at how much of it is acknowledged: from the first look that finds a tenth
// of it gone to the first that finds nine. What is gone faster than it can be looked at twice is measured from the resume.
type drainRate struct {
	size            float64 // events of the backlog
	from, to        time.Time
	before, through float64 // events acknowledged at from and to
}

func (r *drainRate) addSample(acked float64, now time.Time) (done bool) {
	switch {
	case r.before == 0 && acked >= r.size/10 && acked < r.size/2:
		r.before, r.from = acked, now
	case acked > max(r.before, r.through):
		r.through, r.to = acked, now
	}
	return r.through >= 0.9*r.size
}

// eventsPerSecond is the rate in events a second, 0 before the second look.
func (r *drainRate) eventsPerSecond() float64 {
	if d := r.to.Sub(r.from).Seconds(); d > 0 {
		return (r.through - r.before) / d
	}
	return 0
}

// sumAcked is how many records those relays have had acknowledged.
func (s *stage) sumAcked(ctx context.Context, relays []*relay) (sum float64) {
	for _, x := range relays {
		n, _ := s.relays.sumCounter(ctx, x, "outrelay_published_total", `result="acked"`) // asked again when it cannot be had
		sum += n
	}
	return sum
}

// sumCounter adds up the series of a counter that have a label.
func (r *relays) sumCounter(ctx context.Context, x *relay, name, label string) (sum float64, err error) {
	err = r.getPath(ctx, x, "/metrics", func(body *bufio.Reader) error {
		lines := bufio.NewScanner(body)
		for lines.Scan() {
			rest, ok := strings.CutPrefix(lines.Text(), name+"{")
			labels, value, both := strings.Cut(rest, "} ")
			if !ok || !both || !strings.Contains(labels, label) {
				continue
			}
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				return err
			}
			sum += n
		}
		return lines.Err()
	})
	return sum, err
}

// runCommand runs one command of the program and waits for its end.
func (s *stage) runCommand(ctx context.Context, args ...string) error {
	s.relays.lastNumber++
	p, err := s.stack.Run(fmt.Sprintf("%s-%d", args[0], s.relays.lastNumber), s.relays.env, s.relays.binary, append(args, "--config", s.relays.config)...)
	if err != nil {
		return err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), p.Kill())
	}
	if err := p.Err(); err != nil {
		return &brokenPromise{fmt.Sprintf("outrelay %s: %v: %s", strings.Join(args, " "), err, strings.Join(p.LastLines(lastLines), "\n"))}
	}
	return nil
}
