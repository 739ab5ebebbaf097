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

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/demo/check"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

var scheduledScenario = Scenario{
	Name:    "scheduled",
	Promise: "events are delivered when they are due, once, also over a kill -9 of the owner; a cancelled one never, a rescheduled one at its new time",
	events:  10_000,
	run:     runScheduled,
}

// ScheduledFinding is the result of scenario scheduled. The due error is the time from the due time
// until the consumer received the event.
type ScheduledFinding struct {
	Outcome
	P50MS       float64 `json:"p50_ms"` // due error without the events that had to wait for the takeover
	P99MS       float64 `json:"p99_ms"`
	AllP50MS    float64 `json:"all_p50_ms"` // due error of all events
	AllP99MS    float64 `json:"all_p99_ms"`
	MaxMS       float64 `json:"max_ms"`
	Early       int     `json:"early"`       // events that arrived before they were due
	Cancelled   int     `json:"cancelled"`   // cancelled in time: they must not be delivered
	Rescheduled int     `json:"rescheduled"` // moved in time: they must be delivered at their new time
	Takeovers   int     `json:"takeovers"`
	TakeoverS   float64 `json:"takeover_s"` // from the kill to the next owner's first delivery
}

func (f *ScheduledFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("due error         p50 %.1f ms p99 %.1f ms; with those due during the takeover "+
			"p50 %.1f ms p99 %.1f ms, longest %.1f ms", f.P50MS, f.P99MS, f.AllP50MS, f.AllP99MS, f.MaxMS),
		fmt.Sprintf("changed           %d cancelled, %d rescheduled; %d came early", f.Cancelled, f.Rescheduled, f.Early),
		fmt.Sprintf("takeover         %d; first delivery %.1f s after the kill", f.Takeovers, f.TakeoverS),
	}
}

const (
	dueRate  = 1000            // events per second that are due
	dueLeast = 4 * time.Second // minimum time in which all events are due
	dueLead  = 3 * time.Second // from when the last event is scheduled until the first is due
	dueError = time.Second     // maximum of the 99th percentile
	dueClock = 20 * time.Millisecond
	dueBatch = 100 // maximum number of events that are scheduled in one transaction

	changeLead = 2 * time.Second // how long before its due time an event is cancelled or moved
	changedOf  = 20              // one of this many events is cancelled, and one is rescheduled
)

// dueEvent is one scheduled event.
type dueEvent struct {
	id   uuid.UUID
	at   time.Time
	seen time.Time
}

// calendar contains the scheduled events.
type calendar struct {
	stage *stage
	span  time.Duration // in which all are due

	mu  sync.Mutex
	all map[string]*dueEvent
}

func runScheduled(ctx context.Context, stage *stage) (Finding, error) {
	finding := &ScheduledFinding{}
	calendar := &calendar{stage: stage, all: map[string]*dueEvent{}}
	onRecord := calendar.recordSeen
	stage.onRecord.Store(&onRecord)
	if _, err := stage.startAndAwait(ctx, "owner"); err != nil {
		return finding, err
	}
	if _, err := stage.startAndAwait(ctx, "standby"); err != nil {
		return finding, err
	}

	calendar.span = max(time.Duration(stage.options.Events)*time.Second/dueRate, dueLeast)
	lead, err := stage.measureScheduling(ctx)
	if err != nil {
		return finding, err
	}
	first := time.Now().Add(dueLead + lead)
	if err := calendar.scheduleAll(ctx, first); err != nil {
		return finding, err
	}
	stage.printEvent("%s events are scheduled; the first is due in %.1f s, all within %v",
		formatThousands(stage.options.Events), time.Until(first).Seconds(), calendar.span)

	changed := make(chan error, 1)
	stage.loads.Go(func() { changed <- calendar.changeEvents(ctx, finding) })
	killed, err := stage.killAt(ctx, first.Add(calendar.span/2))
	if err = errors.Join(err, <-changed); err != nil {
		return finding, err
	}
	err = stage.awaitCondition(ctx, "the last one is due", calendar.span+time.Minute, func() bool {
		return time.Now().After(first.Add(calendar.span))
	})
	if err != nil {
		return finding, err
	}
	if err := stage.awaitArrival(ctx); err != nil {
		return finding, err
	}

	stage.mu.Lock()
	acquired := stage.lastOwnership.acquiredAt
	finding.Takeovers = int(stage.lastOwnership.epoch - stage.firstEpoch)
	stage.mu.Unlock()
	calendar.computeFigures(finding, killed, acquired)

	// With fewer events, one stall of the machine would decide the percentile.
	if finding.P99MS > float64(dueError.Milliseconds()) && stage.options.Events >= stage.scenario.events {
		stage.recordBroken("the due error's 99th percentile is %.0f ms, %v expected", finding.P99MS, dueError)
	}
	if finding.Early > 0 {
		stage.recordBroken("%d events came before they were due", finding.Early)
	}
	return finding, nil
}

// measureScheduling estimates how long it takes to schedule all events. It schedules one batch and
// rolls it back.
func (s *stage) measureScheduling(ctx context.Context) (time.Duration, error) {
	events := make([]event.Event, dueBatch)
	for i := range events {
		id := uuid.Must(uuid.NewV7())
		events[i] = event.New(event.Aggregate{Type: aggregate, ID: id.String()}, "ReminderDue", event.Bytes("", []byte(`{}`)),
			event.WithID(id), event.WithDueAt(time.Now().Add(time.Hour)))
	}

	began := time.Now()
	err := s.service.box.Transaction(ctx, func(ctx context.Context) error {
		return errors.Join(s.service.box.Append(ctx, events...), errChangedMind)
	})
	if !errors.Is(err, errChangedMind) {
		return 0, fmt.Errorf("scheduling events: %w", err)
	}
	perBatch := max(time.Since(began), time.Second*dueBatch/5000)
	return perBatch * time.Duration(s.options.Events) / dueBatch, nil
}

// scheduleAll schedules all events, evenly over the span. Each has its own key, because due times
// have no order per key.
func (c *calendar) scheduleAll(ctx context.Context, first time.Time) error {
	var group errgroup.Group
	for w := range workers {
		group.Go(func() error {
			var batch []*dueEvent
			for i := w; i < c.stage.options.Events; i += workers {
				offset := c.span * time.Duration(i) / time.Duration(c.stage.options.Events)
				at := first.Add(offset).Truncate(time.Millisecond)
				batch = append(batch, &dueEvent{id: uuid.Must(uuid.NewV7()), at: at})

				last := i+workers >= c.stage.options.Events
				if len(batch) < dueBatch && !last {
					continue
				}
				if err := c.scheduleBatch(ctx, batch); err != nil {
					return fmt.Errorf("scheduling events: %w", err)
				}
				batch = nil
			}
			return nil
		})
	}
	return group.Wait()
}

func (c *calendar) scheduleBatch(ctx context.Context, batch []*dueEvent) error {
	events := make([]event.Event, len(batch))
	for i, d := range batch {
		id := d.id.String()
		payload := fmt.Appendf(nil, `{"reminder":%q}`, id)
		events[i] = event.New(event.Aggregate{Type: aggregate, ID: id}, "ReminderDue", event.Bytes("", payload), event.WithID(d.id), event.WithDueAt(d.at))
		c.stage.check.Begin(check.Event{ID: id, Key: id, Topics: []string{c.stage.names.topicName(aggregate)}, Value: payload})
	}
	c.addAll(batch)
	err := c.stage.service.box.Transaction(ctx, func(ctx context.Context) error {
		return c.stage.service.box.Append(ctx, events...)
	})
	if err != nil {
		return err
	}

	// changeEvents reports the other events to the checker, when their fate is known.
	for _, d := range batch {
		if c.fateOf(d.id) == keep {
			c.stage.check.Committed(d.at, d.id.String())
		}
	}
	return nil
}

// fate is what changeEvents does with an event.
type fate int

const (
	keep fate = iota
	cancel
	move
)

// fateOf returns the fate of an event. It depends on the id, whose last bytes are random.
func (c *calendar) fateOf(id uuid.UUID) fate {
	switch int(id[15]) % changedOf {
	case 0:
		return cancel
	case 1:
		return move
	}
	return keep
}

// changeEvents cancels some events and moves others, earlier or later, while earlier events are
// delivered. If an event can no longer be changed, it is delivered at its time.
func (c *calendar) changeEvents(ctx context.Context, finding *ScheduledFinding) error {
	for _, d := range c.byTime() {
		fate := c.fateOf(d.id)
		if fate == keep {
			continue
		}
		// A change just before the due time competes with the claim of the owner.
		if retry.Sleep(ctx, time.Until(d.at.Add(-changeLead))) != nil {
			return context.Cause(ctx)
		}

		id := d.id.String()
		var err error
		if fate == cancel {
			err = c.stage.service.box.Cancel(ctx, event.NewID(d.id))
			if err == nil {
				c.stage.check.Aborted(id)
				finding.Cancelled++
				continue
			}
		} else {
			to := d.at.Add(time.Duration(int(d.id[14])-128) * 10 * time.Millisecond)
			err = c.stage.service.box.Reschedule(ctx, event.NewID(d.id), to)
			if err == nil {
				c.moveEvent(id, to)
				finding.Rescheduled++
			}
		}
		if err != nil && !errors.Is(err, outbox.ErrNotScheduled) {
			return err
		}
		c.stage.check.Committed(c.dueTimeOf(id), id)
	}
	return nil
}

// killAt kills the owner at the given time, blocks until the standby takes over, and returns the
// time of the kill.
func (s *stage) killAt(ctx context.Context, moment time.Time) (time.Time, error) {
	err := s.awaitCondition(ctx, "the time of the kill", time.Until(moment)+time.Minute, func() bool {
		return time.Now().After(moment)
	})
	if err != nil {
		return time.Time{}, err
	}

	// On a busy machine a lease sometimes expires. Then there is no owner to kill for a moment.
	err = s.awaitCondition(ctx, "there are an owner and a standby", patience, func() bool {
		_, err := s.findVictim(ctx)
		return err == nil
	})
	if err != nil {
		return time.Time{}, err
	}

	before := s.follow.currentOwner()
	killed := time.Now()
	if err := s.killOwner(ctx); err != nil {
		return killed, err
	}
	return killed, s.awaitCondition(ctx, "the standby takes over", patience, func() bool {
		return s.follow.currentOwner().epoch > before.epoch
	})
}

func (c *calendar) addAll(batch []*dueEvent) {
	c.mu.Lock()
	defer c.mu.Unlock()

	for _, d := range batch {
		c.all[d.id.String()] = d
	}
}

func (c *calendar) moveEvent(id string, dueAt time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.all[id].at = dueAt.Truncate(time.Millisecond)
}

func (c *calendar) dueTimeOf(id string) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.all[id].at
}

// byTime returns copies of all events, sorted by due time.
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

func (c *calendar) recordSeen(message devstack.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if event := c.all[message.Header(record.HeaderID)]; event != nil && event.seen.IsZero() {
		event.seen = message.Seen
	}
}

// computeFigures sets the figures of finding. Events had to wait for the takeover if they were due before
// the first record of the next owner, and the killed owner had not delivered them.
func (c *calendar) computeFigures(finding *ScheduledFinding, killed, acquired time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()

	firstOfNext := time.Time{}
	for _, d := range c.all {
		if !d.seen.Before(acquired) && (firstOfNext.IsZero() || d.seen.Before(firstOfNext)) {
			firstOfNext = d.seen
		}
	}
	finding.TakeoverS = roundSeconds(firstOfNext.Sub(killed))

	var all, outside []time.Duration
	for _, d := range c.all {
		if d.seen.IsZero() {
			continue
		}
		late := d.seen.Sub(d.at)
		// The clocks of the relay and this process differ a little.
		if late < -dueClock {
			finding.Early++
		}
		all = append(all, late)
		// The takeover delays the other events, so their lateness does not measure the timers.
		if d.seen.Before(acquired) || d.at.After(firstOfNext) {
			outside = append(outside, late)
		}
	}

	slices.Sort(all)
	slices.Sort(outside)
	finding.P50MS = quantile(outside, 0.50)
	finding.P99MS = quantile(outside, 0.99)
	finding.AllP50MS = quantile(all, 0.50)
	finding.AllP99MS = quantile(all, 0.99)
	finding.MaxMS = quantile(all, 1)
}

// quantile returns a quantile of sorted durations in milliseconds, or 0 if there are none.
func quantile(sorted []time.Duration, fraction float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	i := min(int(fraction*float64(len(sorted))), len(sorted)-1)
	return float64(sorted[i].Microseconds()) / 1000
}
