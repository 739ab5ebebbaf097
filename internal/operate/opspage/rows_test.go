package opspage

import (
	"context"
	"html"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// Desks whose lists have two entries with one id.
type (
	twinLetters  struct{ deskLetters }
	twinEvents   struct{ deskSchedule }
	twinWaiting  struct{ deskWaiting }
	twinMessages struct{ deskHandlers }
)

var twins = []string{`["a.outbox","invoice-1"]`, `["b.outbox","invoice-1"]`}

func twinPage[T any](entry func(row string) T) (page admin.Page[T], err error) {
	for _, row := range twins {
		page.Items = append(page.Items, entry(row))
	}
	page.Total = 2
	return page, nil
}

func (twinLetters) List(context.Context, admin.DeadFilter, int, string) (admin.Page[admin.DeadLetter], error) {
	return twinPage(func(row string) admin.DeadLetter {
		return admin.DeadLetter{Row: row, ID: "invoice-1", Source: admin.DeadSource{Kind: admin.FromHandler}}
	})
}

func (twinEvents) List(context.Context, admin.ScheduledFilter, int, string) (admin.Page[admin.Scheduled], error) {
	return twinPage(func(row string) admin.Scheduled { return admin.Scheduled{Row: row, ID: "invoice-1"} })
}

func (twinWaiting) Topics(context.Context) ([]admin.WaitingTopic, error) {
	return []admin.WaitingTopic{{Topic: "orders", Retry: 2}}, nil
}

func (twinWaiting) List(context.Context, admin.WaitingFilter, int, string) (admin.Page[admin.WaitingEnvelope], error) {
	return twinPage(func(row string) admin.WaitingEnvelope {
		return admin.WaitingEnvelope{Row: row, ID: "invoice-1", Reason: "retry"}
	})
}

func (twinMessages) List(context.Context, admin.HandlerWaitingFilter, int, string) (admin.Page[admin.HandlerMessage], error) {
	return twinPage(func(row string) admin.HandlerMessage {
		return admin.HandlerMessage{Row: row, ID: "invoice-1", Place: "orders/0@7"}
	})
}

// The box of an entry selects this entry, and no other one with its id.
func TestABoxSelectsOneOfTwoEntriesWithOneID(t *testing.T) {
	t.Parallel()
	d := &desk{text: "x"}
	use := d.useCases()
	use.Letters, use.Schedule = twinLetters{deskLetters{d}}, twinEvents{deskSchedule{d}}
	use.Waiting, use.Handlers = twinWaiting{deskWaiting{d}}, twinMessages{deskHandlers{d}}
	site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases { return use }})

	for _, at := range []string{"/dead", "/scheduled", "/waiting", "/waiting/handlers"} {
		_, body := sendRequest(t, site, &operator, "GET", at, nil)
		for _, row := range twins {
			if box := `name="pick" value="` + html.EscapeString(row) + `"`; strings.Count(body, box) != 1 {
				t.Errorf("%s: %d boxes %s, want 1", at, strings.Count(body, box), box)
			}
		}
	}
}
