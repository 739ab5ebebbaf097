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
	events:  40_000,
	rate:    400,
	run:     runSlots,
}

// roundTrip is the simulated round-trip time between the relays and a remote replica set. It limits
// the rate of a change stream: the stream requests the next reply, of at most 2,000 events, when it
// has received the previous one.
const roundTrip = 60 * time.Millisecond

// SlotsFinding is the result of scenario slots.
type SlotsFinding struct {
	Outcome
	// The rates are those of a backlog, in events per second. The first two are measured with a
	// remote replica set, so that a slot waits for replies. The others are measured with all
	// servers and relays on this machine, where they share its processors.
	OneSlotEPS  float64 `json:"one_slot_eps"`
	TwoSlotEPS  float64 `json:"two_slot_eps"` // two slots, in two processes
	RoundTripMS int64   `json:"round_trip_ms"`
	OneNearEPS  float64 `json:"one_slot_near_eps"`
	TwoNearEPS  float64 `json:"two_slot_near_eps"`
	Processors  int     `json:"processors"`
	ResliceS    float64 `json:"reslice_s"` // duration of the division of the watcher
	Handovers   int     `json:"handovers"` // of slots, while nodes joined, left and died
	SharedS     float64 `json:"shared_s"`  // longest time until a new node had its slot
}

func (f *SlotsFinding) describeFigures() []string {
	gain := func(one, two float64) float64 {
		if one <= 0 {
			return 0
		}
		return 100 * (two/one - 1)
	}

	return []string{
		fmt.Sprintf("remote MongoDB    one slot %s events a second, two slots %s (%+.0f %%): "+
			"%d ms for each reply of a stream is the limit of a slot",
			formatThousands(int(f.OneSlotEPS)), formatThousands(int(f.TwoSlotEPS)),
			gain(f.OneSlotEPS, f.TwoSlotEPS), f.RoundTripMS),
		fmt.Sprintf("local MongoDB     one slot %s events a second, two slots %s (%+.0f %%): "+
			"servers, relays and consumer share %d processors, and those are the limit",
			formatThousands(int(f.OneNearEPS)), formatThousands(int(f.TwoNearEPS)),
			gain(f.OneNearEPS, f.TwoNearEPS), f.Processors),
		fmt.Sprintf("divided           in %.1f s, the drain and the fence included", f.ResliceS),
		fmt.Sprintf("shared            %d hand-overs; a node that joined had its slot after at most %.1f s",
			f.Handovers, f.SharedS),
	}
}

// slotsRun measures the slots and the nodes that share them.
type slotsRun struct {
	stage   *stage
	finding *SlotsFinding
}

func runSlots(ctx context.Context, s *stage) (Finding, error) {
	f := &SlotsFinding{RoundTripMS: roundTrip.Milliseconds(), Processors: runtime.NumCPU()}
	r := &slotsRun{s, f}
	members := s.stack.Mongods()
	// The proxy delays the connections to one member. The driver would connect to the others without the delay.
	if len(members) != 1 {
		return f, fmt.Errorf("scenario slots needs a replica set of one member, but the replica set has %d: "+
			"unset %s, and outrelay starts one", len(members), devstack.EnvMongoDB)
	}

	proxy, err := newDelayProxy(members[0].Addr(), roundTrip/2)
	if err != nil {
		return f, err
	}
	defer proxy.closeAll()
	uri, err := proxyURI(s.stack.MongoURI(), proxy.listenAddress())
	if err != nil {
		return f, err
	}
	remote := []string{"--set", "mongodb.uri=" + uri}

	if f.OneNearEPS, _, err = r.measureSlots(ctx, 1, nil, true); err != nil {
		return f, err
	}
	if f.OneSlotEPS, _, err = r.measureSlots(ctx, 1, remote, true); err != nil {
		return f, err
	}

	began := time.Now()
	if err := s.runCommand(ctx, "reslice", "--slots", "2", "--yes"); err != nil {
		return f, err
	}
	f.ResliceS = roundSeconds(time.Since(began))
	s.printEvent("the watcher has two slots, %.1f s later", f.ResliceS)

	if f.TwoSlotEPS, _, err = r.measureSlots(ctx, 2, remote, true); err != nil {
		return f, err
	}
	var nodes []*relay
	if f.TwoNearEPS, nodes, err = r.measureSlots(ctx, 2, nil, false); err != nil {
		return f, err
	}

	if err := r.comeAndGo(ctx, nodes[0], nodes[1]); err != nil {
		return f, err
	}

	// With fewer events there are too few replies to compare.
	if f.TwoSlotEPS <= f.OneSlotEPS && s.options.Events >= s.scenario.events {
		s.recordBroken("two slots drain %.0f events/s, one %.0f", f.TwoSlotEPS, f.OneSlotEPS)
	}
	return f, nil
}

// proxyURI returns the URI of a replica set of one member with the address of its proxy. The result
// contains nothing that makes the driver connect to the member directly.
func proxyURI(uri, proxy string) (string, error) {
	u, err := url.Parse(uri)
	if err != nil {
		// The original error would contain the URI with its password.
		return "", errors.New("the address of MongoDB is not a valid URL")
	}

	q := u.Query()
	q.Del("replicaSet")
	q.Set("directConnection", "true")
	u.Host = proxy
	u.Path = cmp.Or(u.Path, "/")
	u.RawQuery = q.Encode()
	return u.String(), nil
}

// measureSlots starts one node per slot and measures how fast they drain a backlog. With end it
// stops the nodes afterwards.
func (r *slotsRun) measureSlots(
	ctx context.Context, slots int, args []string, end bool,
) (eps float64, nodes []*relay, err error) {
	r.stage.relays.extraArgs = append([]string{"--set", "slots=" + strconv.Itoa(slots)}, args...)
	for range slots {
		x, err := r.stage.relays.startRelay()
		if err != nil {
			return 0, nil, err
		}
		nodes = append(nodes, x)
	}
	if err := r.awaitShared(ctx, nodes...); err != nil {
		return 0, nodes, err
	}

	if eps, err = r.measureBacklog(ctx, nodes...); err != nil {
		return 0, nodes, err
	}
	where := ""
	if args != nil {
		where = fmt.Sprintf(", with a round trip of %v to the replica set", roundTrip)
	}
	r.stage.printEvent("%d of %d slots in as many processes drain %s events/s%s",
		slots, slots, formatThousands(int(eps)), where)

	if end {
		for _, x := range nodes {
			r.stage.stopAndWait(x)
		}
	}
	return eps, nodes, nil
}

// comeAndGo lets nodes join, leave and die under load. a and b are the running nodes.
func (r *slotsRun) comeAndGo(ctx context.Context, a, b *relay) error {
	before, err := r.sumEpochs(ctx)
	if err != nil {
		return err
	}
	l, err := r.stage.startLoad(ctx, aggregate, "walk-in", r.stage.options.Rate, 0)
	if err != nil {
		return err
	}

	for round := range 2 {
		// An orderly end releases the lease; a kill lets it expire. Both must move the slot.
		r.stage.printEvent("%s leaves", b.node)
		r.stage.stopAndWait(b)
		if err := r.awaitShared(ctx, a, a); err != nil {
			return err
		}
		if b, err = r.joinNode(ctx, a); err != nil {
			return err
		}

		r.stage.printEvent("%s is killed", a.node)
		a.markExpected()
		if err := a.prog.Kill(); err != nil {
			return err
		}
		if err := r.awaitShared(ctx, b, b); err != nil {
			return err
		}
		if a, err = r.joinNode(ctx, b); err != nil {
			return err
		}

		if err := r.stage.runFor(ctx, time.Duration(1+round)*time.Second); err != nil {
			return err
		}
	}
	if err := l.finishLoad(true); err != nil {
		return err
	}

	after, err := r.sumEpochs(ctx)
	r.finding.Handovers = after - before
	if err != nil {
		return err
	}
	return r.stage.awaitArrival(ctx)
}

// joinNode starts a node in addition to other, and blocks until each of them has a slot.
func (r *slotsRun) joinNode(ctx context.Context, other *relay) (*relay, error) {
	began := time.Now()
	x, err := r.stage.relays.startRelay()
	if err != nil {
		return nil, err
	}
	if err := r.awaitShared(ctx, other, x); err != nil {
		return nil, err
	}

	took := roundSeconds(time.Since(began))
	r.finding.SharedS = max(r.finding.SharedS, took)
	r.stage.printEvent("%s has joined and has a slot, after %.1f s", x.node, took)
	return x, nil
}

// readWatchers returns the slots, or nil if they cannot be read. Callers repeat the call.
func (s *stage) readWatchers(ctx context.Context) []admin.Watcher {
	status, err := admin.ReadStatus(ctx, s.stateDatabase())
	if err != nil {
		return nil
	}
	return status.Watchers
}

func (r *slotsRun) sumEpochs(ctx context.Context) (n int, err error) {
	status, err := admin.ReadStatus(ctx, r.stage.stateDatabase())
	for _, w := range status.Watchers {
		n += int(w.Epoch)
	}
	return n, err
}

// awaitShared blocks until each of the nodes owns a slot and no other node owns any. A node that is
// passed twice must own two slots.
func (r *slotsRun) awaitShared(ctx context.Context, nodes ...*relay) error {
	var want []string
	for _, x := range nodes {
		want = append(want, x.node)
	}
	slices.Sort(want)

	what := "each of " + strings.Join(want, " and ") + " has a slot"
	return r.stage.awaitCondition(ctx, what, patience, func() bool {
		var got []string
		for _, w := range r.stage.readWatchers(ctx) {
			if w.Owner != "" && w.State == "live" {
				got = append(got, w.Node)
			}
		}
		slices.Sort(got)
		return slices.Equal(got, want)
	})
}

// measureBacklog returns the rate at which the relays drain a backlog, in events per second.
func (r *slotsRun) measureBacklog(ctx context.Context, relays ...*relay) (eps float64, err error) {
	// The better of two results counts, because other work on this machine only makes a drain
	// slower. With few events the rate is not compared.
	times := 2
	if r.stage.options.Events < r.stage.scenario.events {
		times = 1
	}

	for range times {
		measured, err := r.drainOnce(ctx, relays)
		if err != nil {
			return 0, err
		}
		eps = max(eps, measured)
	}
	return eps, nil
}

// drainOnce appends events while the watcher is paused, resumes it, and returns the rate at which
// Kafka acknowledges them.
func (r *slotsRun) drainOnce(ctx context.Context, relays []*relay) (eps float64, err error) {
	op := admin.Operator{State: r.stage.stateDatabase(), Watcher: watcher, Actor: "dev"}
	if err := op.Lease().Pause(ctx); err != nil {
		return 0, err
	}
	isOwned := func(w admin.Watcher) bool { return w.Owner != "" }
	err = r.stage.awaitCondition(ctx, "the watcher is paused", patience, func() bool {
		return !slices.ContainsFunc(r.stage.readWatchers(ctx), isOwned)
	})
	if err != nil {
		return 0, err
	}

	n := r.stage.options.Events
	l, err := r.stage.startLoad(ctx, aggregate, "customer", r.stage.options.Rate, n, appendInBulk)
	if err != nil {
		return 0, err
	}
	before, _ := r.stage.check.Progress()
	err = r.stage.awaitCondition(ctx, "the backlog is appended", 2*patience, func() bool {
		committed, _ := r.stage.check.Progress()
		return committed-before >= n
	})
	if err != nil {
		return 0, err
	}
	if err := l.finishLoad(false); err != nil {
		return 0, err
	}

	ackedBefore := r.sumAcked(ctx, relays)
	if err := op.Lease().Resume(ctx); err != nil {
		return 0, err
	}
	rate := drainRate{size: float64(n), from: time.Now()}
	lastScrape := time.Time{}
	err = r.stage.awaitCondition(ctx, "the backlog is drained", 2*patience, func() bool {
		// Scrapes are rare, because they slow down the drain that is measured.
		if time.Since(lastScrape) < 5*lookEvery {
			return false
		}
		lastScrape = time.Now()
		return rate.addSample(r.sumAcked(ctx, relays)-ackedBefore, time.Now())
	})
	if err != nil {
		return 0, err
	}
	return rate.eventsPerSecond(), r.stage.awaitArrival(ctx)
}

// drainRate computes the rate of a drain from samples of the acknowledged events. It measures from
// the first sample with a tenth of the backlog to the first sample with nine tenths. If the drain
// is too fast for two such samples, it measures from the resume.
type drainRate struct {
	size            float64 // events of the backlog
	from, to        time.Time
	before, through float64 // acknowledged events at from and to
}

// addSample adds a sample, and reports whether the measurement is complete.
func (r *drainRate) addSample(acked float64, now time.Time) (done bool) {
	switch {
	case r.before == 0 && acked >= r.size/10 && acked < r.size/2:
		r.before = acked
		r.from = now
	case acked > max(r.before, r.through):
		r.through = acked
		r.to = now
	}
	return r.through >= 0.9*r.size
}

// eventsPerSecond returns the rate, or 0 before the second sample.
func (r *drainRate) eventsPerSecond() float64 {
	if d := r.to.Sub(r.from).Seconds(); d > 0 {
		return (r.through - r.before) / d
	}
	return 0
}

// sumAcked returns the number of acknowledged records of the relays. A relay that cannot be read
// counts as 0. The next sample includes it again.
func (r *slotsRun) sumAcked(ctx context.Context, relays []*relay) (sum float64) {
	for _, x := range relays {
		n, _ := r.stage.relays.sumCounter(ctx, x, "outrelay_published_total", `result="acked"`)
		sum += n
	}
	return sum
}

// sumCounter returns the sum of the series of a counter that have this label.
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

// runCommand runs one command of the program and blocks until it ends.
func (s *stage) runCommand(ctx context.Context, args ...string) error {
	s.relays.lastNumber++
	name := fmt.Sprintf("%s-%d", args[0], s.relays.lastNumber)
	p, err := s.stack.Run(name, s.relays.env, s.relays.binary, append(args, "--config", s.relays.config)...)
	if err != nil {
		return err
	}

	select {
	case <-p.Done():
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), p.Kill())
	}
	if err := p.Err(); err != nil {
		return &brokenPromise{fmt.Sprintf("outrelay %s: %v: %s",
			strings.Join(args, " "), err, strings.Join(p.LastLines(lastLines), "\n"))}
	}
	return nil
}
