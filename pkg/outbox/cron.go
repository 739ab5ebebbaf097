package outbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/robfig/cron/v3"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/pkg/event"
)

// Missed says what becomes of the firings that passed while no process kept the entry. Those that were appended before are
// not missed: the relay delivers them.
type Missed uint8

// What becomes of missed firings.
const (
	MissedOnce Missed = iota // the latest of them is delivered, at once
	MissedSkip               // none
	MissedAll                // each of them is, at once
)

// DefaultCronAhead is how far ahead firings are appended unless CronEntry.Ahead says otherwise.
const DefaultCronAhead = time.Minute

// CronEntry is an event that comes again and again.
type CronEntry struct {
	// Name tells the entry from others of the same outbox. It is part of the events' ids and of the stored state.
	Name string
	// Schedule is a cron expression: minute, hour, day of month, month, day of week, with seconds before them if it has six
	// fields; or @hourly, @daily, @weekly, @monthly, @yearly, or @every with a duration of whole seconds, counted from a fixed
	// time and not from the start of the process. CRON_TZ=<zone> before it says the zone.
	Schedule string
	// Zone is where the expression is meant; a time that a change of the clocks leaves out does not fire. Defaults to UTC.
	Zone *time.Location
	// Event makes the event of a firing; its id and due time are set by the Cron. It may be called more than once for the
	// same firing, by any process that runs the entry, and must not have effects.
	Event func(at time.Time) event.Event
	// Missed defaults to MissedOnce.
	Missed Missed
	// Ahead is how long before its time a firing is appended; the next one always is, however far it is. For so long a
	// service may be away without missing one. Defaults to DefaultCronAhead.
	Ahead time.Duration
}

// Cron keeps the firings of its entries appended ahead of their time as scheduled events, which the relay delivers when they
// are due. It may run in any number of processes: each firing is appended once, because its id is made of the entry's name
// and its time, and because the state of the entry is written in the same transaction. That state is in the collection
// <outbox>_cron beside the outbox, where the service needs find, insert and update; there is one small document for each
// entry. Times are by the server's clock.
//
// An entry whose expression has changed is taken over by the process that started last: firings of the old expression that
// are still ahead are cancelled. An entry that is left out of the next release fires once more, unless Forget is called.
type Cron struct {
	box     *Box
	entries []*cronEntry
}

type cronEntry struct {
	CronEntry
	fires   cron.Schedule
	spec    string // what identifies the schedule
	started bool   // its state was looked at
	told    bool   // that another process has another expression
	next    time.Time
	failed  int
}

// NewCron checks the entries; all that is wrong with them is in the error. It does no I/O.
func NewCron(box *Box, entries ...CronEntry) (*Cron, error) {
	if box == nil {
		return nil, errors.New("cron: the box is nil")
	}
	c := &Cron{box: box}
	names := map[string]bool{}
	var errs []error
	for _, e := range entries {
		x, err := newCronEntry(e)
		if err == nil && names[e.Name] {
			err = errors.New("there is another entry of this name")
		}
		names[e.Name] = true
		if err != nil {
			errs = append(errs, fmt.Errorf("cron entry %q: %w", e.Name, err))
			continue
		}
		c.entries = append(c.entries, x)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return c, nil
}

func newCronEntry(e CronEntry) (*cronEntry, error) {
	switch {
	case e.Name == "" || len(e.Name) > 200:
		return nil, errors.New("a name of 1 to 200 bytes is needed")
	case e.Event == nil:
		return nil, errors.New("it has no Event")
	case e.Missed > MissedAll:
		return nil, fmt.Errorf("%d is no way to treat missed firings", e.Missed)
	case e.Ahead < 0 || e.Ahead > 24*time.Hour:
		return nil, fmt.Errorf("%s ahead; a second to a day is allowed", e.Ahead)
	case e.Ahead == 0:
		e.Ahead = DefaultCronAhead
	}
	e.Ahead = max(e.Ahead, time.Second)
	if e.Zone == nil {
		e.Zone = time.UTC
	}
	x := &cronEntry{CronEntry: e, spec: e.Schedule + " in " + e.Zone.String()}
	var err error
	if x.fires, err = parseCron(e.Schedule); err != nil {
		return nil, err
	}
	at := x.after(time.Now())
	if at.IsZero() {
		return nil, fmt.Errorf("%q never fires", e.Schedule)
	}
	if err := x.firing(uuid.New(), at).Validate(); err != nil {
		return nil, err
	}
	return x, nil
}

var cronParser = cron.NewParser(cron.SecondOptional | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor)

func parseCron(spec string) (cron.Schedule, error) {
	if zone, _, ok := strings.Cut(spec, " "); !ok && strings.Contains(zone, "TZ=") {
		return nil, fmt.Errorf("%q has a zone and nothing else", spec) // the parser would panic
	}
	s, err := cronParser.Parse(spec)
	if err != nil {
		return nil, err
	}
	if every, ok := s.(cron.ConstantDelaySchedule); ok {
		return aligned(every.Delay), nil
	}
	return s, nil
}

// aligned fires at the multiples of a duration, so that all processes mean the same times.
type aligned time.Duration

func (a aligned) Next(t time.Time) time.Time {
	return t.Truncate(time.Duration(a)).Add(time.Duration(a))
}

// after is the first firing after t, zero if there is none.
func (e *cronEntry) after(t time.Time) time.Time { return firing(e.fires, e.Zone, t) }

func firing(s cron.Schedule, zone *time.Location, t time.Time) time.Time {
	at := s.Next(t.In(zone))
	if at.IsZero() {
		return at
	}
	return at.UTC()
}

// latest is the last firing in (after, until], zero if there is none. It looks backwards from the end, so that a long
// absence costs no more than a short one.
func (e *cronEntry) latest(after, until time.Time) time.Time {
	var found time.Time
	for back := time.Second; found.IsZero(); back *= 2 {
		from := until.Add(-back)
		last := !from.After(after)
		if last {
			from = after
		}
		for at := e.after(from); !at.IsZero() && !at.After(until); at = e.after(at) {
			found = at
		}
		if last {
			break
		}
	}
	return found
}

// cronSpace is the name space of the ids (RFC 9562, version 5).
var cronSpace = uuid.MustParse("0d9b1c8e-7f52-4a0c-9a53-6c1d6a5b7e21")

// CronID is the id of a firing of an entry of this outbox, for Cancel and Reschedule.
func (b *Box) CronID(name string, at time.Time) event.ID { return event.NewID(b.cronUUID(name, at)) }

func (b *Box) cronUUID(name string, at time.Time) uuid.UUID {
	text := b.coll.Database().Name() + "." + b.collection + "\x00" + name + "\x00" + at.UTC().Truncate(time.Second).Format(time.RFC3339)
	return uuid.NewSHA1(cronSpace, []byte(text))
}

// firing is the event of a firing.
func (e *cronEntry) firing(id uuid.UUID, at time.Time) event.Event {
	return e.Event(at.In(e.Zone)).With(event.WithID(id), event.WithDueAt(at))
}

const (
	cronLook  = time.Minute // the longest time between two looks at the clock of the server
	cronRetry = 30 * time.Second
	cronCall  = 30 * time.Second // one entry
)

// Run keeps the entries until ctx ends, whose cause it returns. Whatever goes wrong is logged and tried again.
func (c *Cron) Run(ctx context.Context) error {
	for _, e := range c.entries {
		e.started, e.next = false, time.Time{}
	}
	for {
		wait := c.round(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
	}
}

// round does what is to be done now and returns the time until there is more.
func (c *Cron) round(ctx context.Context) time.Duration {
	now, err := c.serverTime(ctx)
	asked := time.Now()
	if err != nil {
		c.box.log.WarnContext(ctx, "cron entries wait: the server's time is not to be had", "error", err)
		return time.Second + rand.N(time.Second)
	}
	wait := cronLook
	for _, e := range c.entries {
		if ctx.Err() != nil {
			return 0
		}
		at := now.Add(time.Since(asked))
		if !e.next.After(at) {
			c.keep(ctx, e, at)
		}
		wait = min(wait, e.next.Sub(now)-time.Since(asked))
	}
	return max(wait, 5*time.Millisecond)
}

// keep brings one entry up to date and says when it is to be looked at next.
func (c *Cron) keep(ctx context.Context, e *cronEntry, now time.Time) {
	call, cancel := context.WithTimeout(ctx, cronCall)
	defer cancel()
	next, err := c.step(call, e, now)
	if err == nil {
		e.started, e.failed, e.next = true, 0, next
		return
	}
	e.failed++
	back := min(100*time.Millisecond<<min(e.failed, 10), cronRetry)
	e.next = now.Add(rand.N(back))
	if ctx.Err() == nil {
		c.box.log.WarnContext(ctx, "a cron entry could not be kept up; trying again", "entry", e.Name, "collection", c.box.collection, "attempt", e.failed, "error", err)
	}
}

func (c *Cron) serverTime(ctx context.Context) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var reply struct {
		LocalTime time.Time `bson:"localTime"`
	}
	err := c.box.coll.Database().Client().Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}},
		options.RunCmd().SetReadPreference(readpref.Primary())).Decode(&reply)
	return reply.LocalTime, err
}
