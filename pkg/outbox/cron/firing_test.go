package cron

import (
	"slices"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func checkedEntry(t *testing.T, e Entry) *entry {
	t.Helper()
	e.Name, e.Event = "e", func(time.Time) event.Event {
		return event.New(event.Aggregate{Type: "a", ID: "b"}, "c", event.Payload{})
	}
	x, err := newEntry(e)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func parseClock(s string) time.Time {
	at, err := time.Parse("2006-01-02 15:04:05", s)
	if err != nil {
		panic(err)
	}
	return at
}

func TestCronFiringsThatAreLacking(t *testing.T) {
	t.Parallel()
	hourly := Entry{Schedule: "0 * * * *"}
	second := Entry{Schedule: "* * * * * *", Ahead: 4 * time.Second}
	with := func(e Entry, m Missed) Entry { e.Missed = m; return e }
	for name, x := range map[string]struct {
		e         Entry
		last, now string
		want      []string
		wake      string
	}{
		"new":                     {hourly, "2026-05-01 10:30:00", "2026-05-01 10:30:00", []string{"2026-05-01 11:00:00"}, "2026-05-01 11:00:00"},
		"one is to come":          {hourly, "2026-05-01 11:00:00", "2026-05-01 10:59:50", nil, "2026-05-01 11:00:00"},
		"it fires":                {hourly, "2026-05-01 11:00:00", "2026-05-01 11:00:00", []string{"2026-05-01 12:00:00"}, "2026-05-01 12:00:00"},
		"missed, once":            {hourly, "2026-05-01 11:00:00", "2026-05-01 14:30:00", []string{"2026-05-01 14:00:00", "2026-05-01 15:00:00"}, "2026-05-01 15:00:00"},
		"missed none, once":       {hourly, "2026-05-01 14:00:00", "2026-05-01 14:30:00", []string{"2026-05-01 15:00:00"}, "2026-05-01 15:00:00"},
		"missed, skip":            {with(hourly, Skip), "2026-05-01 11:00:00", "2026-05-01 14:30:00", []string{"2026-05-01 15:00:00"}, "2026-05-01 15:00:00"},
		"missed, all":             {with(hourly, All), "2026-05-01 11:00:00", "2026-05-01 13:30:00", []string{"2026-05-01 12:00:00", "2026-05-01 13:00:00", "2026-05-01 14:00:00"}, "2026-05-01 14:00:00"},
		"dense, new":              {second, "2026-05-01 10:00:00", "2026-05-01 10:00:00", []string{"2026-05-01 10:00:01", "2026-05-01 10:00:02", "2026-05-01 10:00:03", "2026-05-01 10:00:04"}, "2026-05-01 10:00:03"},
		"dense, half is used up":  {second, "2026-05-01 10:00:04", "2026-05-01 10:00:03", []string{"2026-05-01 10:00:05", "2026-05-01 10:00:06", "2026-05-01 10:00:07"}, "2026-05-01 10:00:06"},
		"a year of seconds, once": {second, "2025-05-01 10:00:00", "2026-05-01 10:00:00", []string{"2026-05-01 10:00:00", "2026-05-01 10:00:01", "2026-05-01 10:00:02", "2026-05-01 10:00:03", "2026-05-01 10:00:04"}, "2026-05-01 10:00:03"},
	} {
		e := checkedEntry(t, x.e)
		list, end := e.missingFirings(parseClock(x.last), parseClock(x.now))
		var got []string
		for _, at := range list {
			got = append(got, at.Format("2006-01-02 15:04:05"))
		}

		if !slices.Equal(got, x.want) {
			t.Errorf("%s: %q, want %q", name, got, x.want)
		}

		if wake := e.nextCheckTime(end, parseClock(x.now)); !wake.Equal(parseClock(x.wake)) {
			t.Errorf("%s: looks again at %s, want %s", name, wake, x.wake)
		}
	}
}

func TestCronAllMissedComeInPieces(t *testing.T) {
	t.Parallel()
	e := checkedEntry(t, Entry{Schedule: "* * * * * *", Missed: All, Ahead: time.Second})
	last, now, n, rounds := parseClock("2026-05-01 10:00:00"), parseClock("2026-05-01 10:20:00"), 0, 0
	for {
		list, end := e.missingFirings(last, now)
		if len(list) > maxFiringsPerTransaction {
			t.Fatalf("%d at once", len(list))
		}

		for _, at := range list {
			if want := last.Add(time.Second); !at.Equal(want) {
				t.Fatalf("%s, want %s", at, want)
			}
			last = at
		}

		n, last, rounds = n+len(list), end, rounds+1
		if wake := e.nextCheckTime(end, now); wake.After(now) {
			break
		}
	}

	if n != 1201 || rounds != 3 {
		t.Errorf("%d firings in %d pieces", n, rounds)
	}
}

func TestCronExpressions(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}

	for _, x := range []struct {
		e         Entry
		now, want string
	}{
		{Entry{Schedule: "30 9 * * 1-5", Zone: berlin}, "2026-01-02 09:00:00", "2026-01-05 08:30:00"},
		{Entry{Schedule: "30 9 * * *", Zone: berlin}, "2026-07-02 09:00:00", "2026-07-03 07:30:00"},
		{Entry{Schedule: "CRON_TZ=America/New_York 0 12 * * *", Zone: berlin}, "2026-07-02 09:00:00", "2026-07-02 16:00:00"},
		{Entry{Schedule: "30 2 29 3 *", Zone: berlin}, "2026-03-28 09:00:00", "2027-03-29 00:30:00"}, // left out in 2026
		{Entry{Schedule: "15 * * * * *"}, "2026-07-02 09:00:30", "2026-07-02 09:01:15"},
		{Entry{Schedule: "@daily"}, "2026-07-02 09:00:30", "2026-07-03 00:00:00"},
		{Entry{Schedule: "@every 90s"}, "2026-07-02 09:00:31", "2026-07-02 09:01:30"},
		{Entry{Schedule: "@every 90s"}, "2026-07-02 09:01:29", "2026-07-02 09:01:30"},
		{Entry{Schedule: "@every 90s"}, "2026-07-02 09:01:30", "2026-07-02 09:03:00"},
	} {
		e := checkedEntry(t, x.e)
		if got := e.nextFiring(parseClock(x.now)); !got.Equal(parseClock(x.want)) {
			t.Errorf("%s after %s: %s, want %s", x.e.Schedule, x.now, got, x.want)
		}
	}
}

func TestCronRejectsBadEntries(t *testing.T) {
	t.Parallel()
	box, err := outbox.New(stacktest.Client(t).Database("x"))
	if err != nil {
		t.Fatal(err)
	}

	good := Entry{Name: "e", Schedule: "@daily", Event: func(time.Time) event.Event {
		return event.New(event.Aggregate{Type: "a", ID: "b"}, "c", event.Payload{})
	}}
	for name, change := range map[string]func(*Entry){
		"no name":      func(e *Entry) { e.Name = "" },
		"no event":     func(e *Entry) { e.Event = nil },
		"no schedule":  func(e *Entry) { e.Schedule = "" },
		"words":        func(e *Entry) { e.Schedule = "every day" },
		"too many":     func(e *Entry) { e.Schedule = "* * * * * * *" },
		"zone alone":   func(e *Entry) { e.Schedule = "CRON_TZ=UTC" },
		"no such zone": func(e *Entry) { e.Schedule = "CRON_TZ=Nowhere/Land 0 0 * * *" },
		"never fires":  func(e *Entry) { e.Schedule = "0 0 30 2 *" },
		"bad event": func(e *Entry) {
			e.Event = func(time.Time) event.Event { return event.New(event.Aggregate{Type: "", ID: ""}, "", event.Payload{}) }
		},
		"bad policy":    func(e *Entry) { e.Missed = 9 },
		"far ahead":     func(e *Entry) { e.Ahead = 48 * time.Hour },
		"in the past":   func(e *Entry) { e.Ahead = -time.Second },
		"a long name":   func(e *Entry) { e.Name = string(make([]byte, 201)) },
		"two of a name": nil,
	} {
		list := []Entry{good}
		if change != nil {
			change(&list[0])
		} else {
			list = append(list, good)
		}

		if _, err := New(box, list...); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}

	if _, err := New(nil); err == nil {
		t.Error("no box was accepted")
	}
}

func TestCronWhenClocksGoBack(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}

	// From 22:00 UTC on, this day has 25 hours in Berlin.
	start := parseClock("2026-10-24 21:59:59")
	for schedule, want := range map[string]int{
		"30 2 * * *": 1, "CRON_TZ=Europe/Berlin 30 2 * * *": 1, "*/20 2 * * *": 3, "0 */2 * * *": 12, "0 3 * * *": 1, "@daily": 1,
		"0 * * * *": 25, "@hourly": 25, "@every 30m": 50,
	} {
		e, n := checkedEntry(t, Entry{Schedule: schedule, Zone: berlin}), 0
		for at := e.nextFiring(start); at.Before(start.Add(25 * time.Hour)); at = e.nextFiring(at) {
			n++
		}
		if n != want {
			t.Errorf("%s: got %d firings, want %d", schedule, n, want)
		}
	}
}

// The ids of firings that a former release has appended must not change.
func TestCronIDsOfFiringsStay(t *testing.T) {
	t.Parallel()
	box, err := outbox.New(stacktest.Client(t).Database("shop"))
	if err != nil {
		t.Fatal(err)
	}

	c, err := New(box)
	if err != nil {
		t.Fatal(err)
	}

	const want = "13bd38dc-fbc7-5b36-b150-827d281bd285"
	for _, at := range []time.Time{parseClock("2026-05-01 10:00:00"), parseClock("2026-05-01 10:00:00").Add(time.Millisecond).Local()} {
		if got := c.firingID("e", at).String(); got != want {
			t.Errorf("the firing at %s has the id %s, want %s", at, got, want)
		}
	}
}
