package setasidetest

import (
	"context"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/service/setaside"
)

// newMessageAt returns an untried message at a place.
func newMessageAt(place setaside.Place, offset int64) *setaside.Message {
	message := NewMessage("k", 0, offset, 0)
	message.Place, message.ID = place, setaside.MessageID(place, 0, offset, "")
	return message
}

func oneMemberCountsForTheGroup(suite suite) {
	old, removed, foreign := NewMessage("9", 0, 9, 1), Orders, setaside.Place{Handler: "bill/report", Topic: "orders"}
	// The name of a group may begin with the name of another group.
	longer := setaside.Place{Handler: "billing/eu/report", Topic: "orders"}
	old.Elapsed, removed.Topic = time.Hour, "removed"
	suite.add(old, NewMessage("9", 0, 10, 0), newMessageAt(removed, 1), newMessageAt(foreign, 1), newMessageAt(longer, 1))

	counts := 0
	takeCensus := func(member string) setaside.Census {
		suite.Helper()
		census, err := suite.Store.Census(suite.Context(), setaside.Member{Group: "billing", ID: member}, func(_ context.Context, places []setaside.Place) ([]setaside.Place, error) {
			counts++
			if len(places) != 2 || !slices.Contains(places, Orders) {
				suite.Errorf("places of the group: got %v, want %v and %v", places, Orders, removed)
			}
			return []setaside.Place{removed}, nil
		})
		if err != nil {
			suite.Fatal(err)
		}
		return census
	}

	for i, member := range []string{"a", "a", "b"} {
		census := takeCensus(member)
		if len(census.Counts) != 2 {
			suite.Fatalf("counts: got %+v, want two", census.Counts)
		}
		age := census.Now.Sub(census.Counts[0].Since)
		if got := census.Counts[0]; got.N != 2 || got.Handler != Orders.Handler || got.Topic != Orders.Topic || got.Unread || age < time.Hour || age > time.Hour+time.Minute {
			suite.Errorf("census %d, messages that are read: got %+v", i, got)
		}
		if got := census.Counts[1]; got.N != 1 || got.Topic != removed.Topic || !got.Unread || !slices.Equal(got.Partitions, []int32{removed.Partition}) || !got.Since.IsZero() {
			suite.Errorf("census %d, messages that no member reads: got %+v", i, got)
		}
		if census.Keeper != (member == "a") || counts != 1 {
			suite.Errorf("census %d of %s after %d counts: keeper is %t", i, member, counts, census.Keeper)
		}
	}
}

// The members of a group may have different handlers, and one of them counts again and again.
func theHandlersOfAllMembersAreListed(suite suite) {
	counts := 0
	takeCensus := func(member string, handlers ...string) {
		suite.Helper()
		count := func(context.Context, []setaside.Place) ([]setaside.Place, error) { counts++; return nil, nil }
		_, err := suite.Store.Census(suite.Context(), setaside.Member{Group: "billing", ID: member, Handlers: handlers}, count)
		if err != nil {
			suite.Fatal(err)
		}
	}
	check := func(when string, want ...string) {
		suite.Helper()
		if names, err := suite.Store.Handlers(suite.Context(), "billing"); err != nil || !slices.Equal(names, want) {
			suite.Errorf("handlers %s: got %q (%v), want %q", when, names, err, want)
		}
	}

	check("before the first count")
	takeCensus("a", "invoice")
	takeCensus("b", "report", "invoice")
	check("of two members", "invoice", "report")
	for counts < 2 && suite.Context().Err() == nil {
		takeCensus("a", "invoice")
		time.Sleep(50 * time.Millisecond)
	}
	check("after another count", "invoice", "report")

	takeCensus("b", "canary")
	check("after a change", "canary", "invoice")
	if err := suite.Store.Leave(suite.Context(), "billing", "b"); err != nil {
		suite.Fatal(err)
	}
	check("after a member has left", "invoice")
}
