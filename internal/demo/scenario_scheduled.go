package demo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/demo/check"
	"github.com/outrelay/outrelay/internal/devstack"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

var scheduledScenario = Scenario{
	Name:    "scheduled",
	Promise: "events are delivered when they are due, once, also over a kill -9 of the owner; a cancelled one never, a rescheduled one at its new time",
	events:  10_000,
	run:     runScheduled,
}

// ScheduledFinding is what scenario scheduled found. Errors are the times from when an event was due until the consumer had it.
type ScheduledFinding struct {
	Outcome
	P50MS       float64 `json:"p50_ms"` // due error, but for events that had to wait for the take-over
	P99MS       float64 `json:"p99_ms"`
	AllP50MS    float64 `json:"all_p50_ms"` // due error of all
	AllP99MS    float64 `json:"all_p99_ms"`
	MaxMS       float64 `json:"max_ms"`
	Early       int     `json:"early"`       // events that came before they were due
	Cancelled   int     `json:"cancelled"`   // taken back in time: they must not appear
	Rescheduled int     `json:"rescheduled"` // moved in time: they must appear at their new time
	Takeovers   int     `json:"takeovers"`
	TakeoverS   float64 `json:"takeover_s"` // from the kill to the next owner's first delivery
}

func (f *ScheduledFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("due error         p50 %.1f ms p99 %.1f ms; with those due during the take-over p50 %.1f ms p99 %.1f ms, longest %.1f ms", f.P50MS, f.P99MS, f.AllP50MS, f.AllP99MS, f.MaxMS),
		fmt.Sprintf("changed           %d cancelled, %d rescheduled; %d came early", f.Cancelled, f.Rescheduled, f.Early),
		fmt.Sprintf("take-over         %d; first delivery %.1f s after the kill", f.Takeovers, f.TakeoverS),
	}
}

const (
	dueRate  = 1000            // events a second that are due
	dueLeast = 4 * time.Second // in which all are due, at least
	dueLead  = 3 * time.Second // from when the last is scheduled until the first is due
	dueError = time.Second     // what the 99th percentile may be
	dueClock = 20 * time.Millisecond
	dueBatch = 100 // events at most that are scheduled in one transaction

	changeLead = 2 * time.Second // before an event is due, it is cancelled or moved
	changedOf  = 20              // one of so many is cancelled, and one is rescheduled
)

// dueEvent is one scheduled event.
type dueEvent struct {
	id   uuid.UUID
	at   time.Time
	seen time.Time
}

// calendar is what was scheduled.
type calendar struct {
	span time.Duration // in which all are due

	mu  sync.Mutex
	all map[string]*dueEvent
}

func runScheduled(ctx context.Context, s *stage) (Finding, error) {
	f, c := &ScheduledFinding{}, &calendar{all: map[string]*dueEvent{}}
	hear := c.recordSeen
	s.onRecord.Store(&hear)
	if _, err := s.startAndAwait(ctx, "owner"); err != nil {
		return f, err
	}
	if _, err := s.startAndAwait(ctx, "standby"); err != nil {
		return f, err
	}
	c.span = max(time.Duration(s.options.Events)*time.Second/dueRate, dueLeast)
	lead, err := s.measureScheduling(ctx)
	if err != nil {
		return f, err
	}
	first := time.Now().Add(dueLead + lead)
	if err := s.scheduleAll(ctx, c, first); err != nil {
		return f, err
	}
	s.printEvent("%s events are scheduled; the first is due in %.1f s, all within %v", formatThousands(s.options.Events), time.Until(first).Seconds(), c.span)
	changed := make(chan error, 1)
	s.loads.Go(func() { changed <- s.changeEvents(ctx, c, f) })
	killed, err := s.killAt(ctx, first.Add(c.span/2))
	if err = errors.Join(err, <-changed); err != nil {
		return f, err
	}
	if err := s.awaitCondition(ctx, "the last one is due", c.span+time.Minute, func() bool { return time.Now().After(first.Add(c.span)) }); err != nil {
		return f, err
	}
	if err := s.awaitArrival(ctx); err != nil {
		return f, err
	}
	s.mu.Lock()
	acquired := s.lastOwnership.acquiredAt
	f.Takeovers = int(s.lastOwnership.epoch - s.firstEpoch)
	s.mu.Unlock()
	c.computeFigures(f, killed, acquired)
	if f.P99MS > float64(dueError.Milliseconds()) && s.options.Events >= s.scenario.events { // of a few, one stall of the machine is the percentile
		s.recordBroken("the due error's 99th percentile is %.0f ms, %v expected", f.P99MS, dueError)
	}
	if f.Early > 0 {
		s.recordBroken("%d events came before they were due", f.Early)
	}
	return f, nil
}

// measureScheduling is how long it takes to schedule all events, by that of one batch, which is rolled back.
func (s *stage) measureScheduling(ctx context.Context) (time.Duration, error) {
	events := make([]event.Event, dueBatch)
	for i := range events {
		id := uuid.Must(uuid.NewV7())
		events[i] = event.New(aggregate, id.String(), "ReminderDue", []byte(`{}`), event.WithID(id), event.WithDueAt(time.Now().Add(time.Hour)))
	}
	began := time.Now()
	err := outbox.Transaction(ctx, s.client, func(ctx context.Context) error {
		return errors.Join(s.service.box.AppendMany(ctx, events), errChangedMind)
	})
	if !errors.Is(err, errChangedMind) {
		return 0, fmt.Errorf("scheduling events: %w", err)
	}
	one := max(time.Since(began), time.Second*dueBatch/5000)
	return one * time.Duration(s.options.Events) / dueBatch, nil
}

// scheduleAll schedules all events, evenly over the span. Each has a key of its own: a due time has no order to keep.
func (s *stage) scheduleAll(ctx context.Context, c *calendar, first time.Time) error {
	var g errgroup.Group
	for w := range workers {
		g.Go(func() error {
			var batch []*dueEvent
			for i := w; i < s.options.Events; i += workers {
				at := first.Add(c.span * time.Duration(i) / time.Duration(s.options.Events)).Truncate(time.Millisecond)
				batch = append(batch, &dueEvent{id: uuid.Must(uuid.NewV7()), at: at})
				if len(batch) == dueBatch || i+workers >= s.options.Events {
					if err := s.scheduleBatch(ctx, c, batch); err != nil {
						return fmt.Errorf("scheduling events: %w", err)
					}
					batch = nil
				}
			}
			return nil
		})
	}
	return g.Wait()
}

func (s *stage) scheduleBatch(ctx context.Context, c *calendar, batch []*dueEvent) error {
	events := make([]event.Event, len(batch))
	for i, d := range batch {
		id := d.id.String()
		payload := fmt.Appendf(nil, `{"reminder":%q}`, id)
		events[i] = event.New(aggregate, id, "ReminderDue", payload, event.WithID(d.id), event.WithDueAt(d.at))
		s.check.Begin(check.Event{ID: id, Key: id, Topics: []string{s.names.topicName(aggregate)}, Value: payload})
	}
	c.addAll(batch)
	err := outbox.Transaction(ctx, s.client, func(ctx context.Context) error { return s.service.box.AppendMany(ctx, events) })
	if err != nil {
		return err
	}
	for _, d := range batch {
		if c.fateOf(d.id) == keep {
			s.check.Committed(d.at, d.id.String())
		}
	}
	return nil
}

type fate int

const (
	keep fate = iota
	cancel
	move
)

// fateOf says what is done with an event after it was scheduled; its last bytes are random.
func (c *calendar) fateOf(id uuid.UUID) fate {
	switch int(id[15]) % changedOf {
	case 0:
		return cancel
	case 1:
		return move
	}
	return keep
}

// changeEvents cancels some events and moves others, earlier or later, while those before them are being delivered. One that
// cannot be had any more is delivered at its time.
func (s *stage) changeEvents(ctx context.Context, c *calendar, f *ScheduledFinding) error {
	for _, d := range c.byTime() {
		if c.fateOf(d.id) != keep && !sleepFor(ctx, time.Until(d.at.Add(-changeLead))) {
			return context.Cause(ctx)
		}
		id, err := d.id.String(), error(nil)
		switch c.fateOf(d.id) {
		case keep:
			continue // is known to the checker already
		case cancel:
			if err = s.service.box.Cancel(ctx, event.NewID(d.id)); err == nil {
				s.check.Aborted(id)
				f.Cancelled++
				continue
			}
		case move:
			to := d.at.Add(time.Duration(int(d.id[14])-128) * 10 * time.Millisecond)
			if err = s.service.box.Reschedule(ctx, event.NewID(d.id), to); err == nil {
				c.moveEvent(id, to)
				f.Rescheduled++
			}
		}
		if err != nil && !errors.Is(err, outbox.ErrNotScheduled) {
			return err
		}
		s.check.Committed(c.dueTimeOf(id), id)
	}
	return nil
}

// killAt ends the owner by SIGKILL at that time.
func (s *stage) killAt(ctx context.Context, at time.Time) (time.Time, error) {
	if err := s.awaitCondition(ctx, "the time of the kill", time.Until(at)+time.Minute, func() bool { return time.Now().After(at) }); err != nil {
		return time.Time{}, err
	}
	// On a busy machine a lease runs out by itself at times: then there is nobody to kill.
	if err := s.awaitCondition(ctx, "there are an owner and a standby", patience, func() bool { _, err := s.findVictim(ctx); return err == nil }); err != nil {
		return time.Time{}, err
	}
	before, killed := s.follow.currentOwner(), time.Now()
	if err := s.demo.killOwner(ctx); err != nil {
		return killed, err
	}
	return killed, s.awaitCondition(ctx, "the standby takes over", patience, func() bool { return s.follow.currentOwner().epoch > before.epoch })
}

func (c *calendar) addAll(batch []*dueEvent) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range batch {
		c.all[d.id.String()] = d
	}
}

func (c *calendar) moveEvent(id string, to time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all[id].at = to.Truncate(time.Millisecond)
}

func (c *calendar) dueTimeOf(id string) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.all[id].at
}

func (c *calendar) byTime() []dueEvent {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []dueEvent
	for _, d := range c.all {
		all = append(all, *d)
	}
	slices.SortFunc(all, func(a, b dueEvent) int { return a.at.Compare(b.at) })
	return all
}

func (c *calendar) recordSeen(m devstack.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d := c.all[m.Header("id")]; d != nil && d.seen.IsZero() {
		d.seen = m.Seen
	}
}

// computeFigures computes the errors. What belongs to the take-over is what was due before the first record of the next owner and
// had not been delivered by the one before.
func (c *calendar) computeFigures(f *ScheduledFinding, killed, acquired time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := time.Time{}
	for _, d := range c.all {
		if !d.seen.Before(acquired) && (first.IsZero() || d.seen.Before(first)) {
			first = d.seen
		}
	}
	f.TakeoverS = roundSeconds(first.Sub(killed))
	var all, outside []time.Duration
	for _, d := range c.all {
		if d.seen.IsZero() {
			continue
		}
		late := d.seen.Sub(d.at)
		if late < -dueClock {
			f.Early++
		}
		all = append(all, late)
		if d.seen.Before(acquired) || d.at.After(first) {
			outside = append(outside, late)
		}
	}
	slices.Sort(all)
	slices.Sort(outside)
	f.P50MS, f.P99MS = quantile(outside, 0.50), quantile(outside, 0.99)
	f.AllP50MS, f.AllP99MS, f.MaxMS = quantile(all, 0.50), quantile(all, 0.99), quantile(all, 1)
}

// quantile of sorted durations, in milliseconds; 0 of none.
func quantile(sorted []time.Duration, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	i := min(int(q*float64(len(sorted))), len(sorted)-1)
	return float64(sorted[i].Microseconds()) / 1000
}

// sleepFor reports whether d passed before ctx ended.
func sleepFor(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
