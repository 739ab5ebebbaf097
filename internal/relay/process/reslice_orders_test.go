package process_test

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

// TestN28_ResliceKeepsTheOrdersToSlots: the keys of a slot that an operator has paused stay paused
// in all new slots. A pin stays if all joined slots have it.
func TestN28_ResliceKeepsTheOrdersToSlots(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start("slots=4", "node=a")
	b.waitWatchers("four slots of a", sharesAre(map[string]int{"a": 4}))
	b.appendNumbered(0, 100)
	b.checkExactly(100)
	of := func(slot string) admin.Operator {
		return admin.Operator{State: b.state, Watcher: "default", Actor: "ann", Slot: slot}
	}
	for _, slot := range []string{"0of4", "2of4", "3of4"} {
		if err := of(slot).Lease().PinAhead(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
	}
	if err := of("1of4").Lease().Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.waitWatchers("a slot is paused", func(now map[string]admin.SlotStatus) bool { return now["1of4"].Owner == "" })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if err := of("2of4").Lease().StepDown(t.Context(), admin.StepDownOrder{Hold: time.Hour, Force: true}); err != nil {
		t.Fatal(err)
	}

	skip := lease.Skip{NS: b.db.Name() + ".outbox", At: bson.Timestamp{T: uint32(time.Now().Add(time.Hour).Unix())}}
	if err := lease.RequestSkip(t.Context(), b.state.Collection("watchers"), "default/3of4", skip, 0); err != nil {
		t.Fatal(err)
	}
	rep, err := b.reslice(2)
	if err != nil || !rep.Done {
		t.Fatalf("%+v, %v", rep, err)
	}
	orders := func(slot string) lease.Control {
		d, _, err := lease.Read(t.Context(), b.state.Collection("watchers"), "default/"+slot)
		if err != nil {
			t.Fatal(err)
		}
		return d.Control
	}
	if c := orders("0of2"); !c.Paused || c.PausedBy != "ann" || c.PausedAt.IsZero() || c.Pin != "" || !c.StepDownUntil.IsZero() {
		t.Errorf("the orders to slot 0of2 are %+v, want a pause alone", c)
	}
	if c := orders("1of2"); c.Paused || c.Pin != "a" || c.StepDownNode != "a" || time.Until(c.StepDownUntil) < 50*time.Minute {
		t.Errorf("the orders to slot 1of2 are %+v, want a pin to a and its step-down", c)
	} else if len(c.Skips) != 1 || !c.Skips[0].IsSame(skip) {
		t.Errorf("slot 1of2 passes over %+v, want the event of 3of4", c.Skips)
	}
	b.start("slots=2", "node=b")
	b.waitWatchers("the slot that is not paused runs", func(now map[string]admin.SlotStatus) bool { return now["1of2"].Owner != "" })
	if now := b.waitWatchers("both", func(now map[string]admin.SlotStatus) bool { return len(now) == 2 }); now["0of2"].Owner != "" {
		t.Errorf("%s runs keys of a slot that is paused", now["0of2"].Owner)
	}
}

// TestN28_ResliceEndsThePauseOfAKilledOne: the pause of a killed reslice ends with the next reslice, and the pause of an operator stays,
// also if the slot was paused by the reslice before.
func TestN28_ResliceEndsThePauseOfAKilledOne(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start("slots=2", "node=a")
	b.waitWatchers("two slots of a", sharesAre(map[string]int{"a": 2}))
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	docs := b.state.Collection("watchers")
	for _, id := range []string{"default/0of2", "default/1of2"} {
		if err := lease.Pause(t.Context(), docs, id, "outrelay reslice"); err != nil {
			t.Fatal(err)
		}
	}
	first := admin.Operator{State: b.state, Watcher: "default", Actor: "ann", Slot: "0of2"}
	if err := first.Lease().Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	rep, err := b.reslice(4)
	if err != nil || !rep.Done {
		t.Fatalf("%+v, %v", rep, err)
	}

	for slot, by := range map[string]string{"0of4": "ann", "1of4": "ann", "2of4": "", "3of4": ""} {
		now, _, err := lease.Read(t.Context(), docs, "default/"+slot)
		if err != nil || now.Control.PausedBy != by || now.Control.Paused != (by != "") {
			t.Errorf("the orders to slot %s are %+v, %v; want a pause by %q", slot, now.Control, err, by)
		}
	}
}
