package slots

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
	"github.com/outrelay/outrelay/internal/relay/stored/divisions"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// ResliceOptions describes a change of the number of slots of the configured watcher.
type ResliceOptions struct {
	Slots  int
	DryRun bool
	// AllowUndivided permits several slots although more than a tenth of the envelopes lack the field slot.
	AllowUndivided bool
	Wait           time.Duration // bounds the time in which the owners have to drain and release
	Actor          string
	OnStep         func(text string) // called for each step; may be nil
}

// ResliceReport is the output of `outrelay reslice --json`.
type ResliceReport struct {
	Watcher string        `json:"watcher"`
	From    int           `json:"from"` // slots; 0 for a watcher that has never run
	To      int           `json:"to"`
	DryRun  bool          `json:"dry_run"`
	Done    bool          `json:"done"`
	Slots   []ResliceSlot `json:"slots"` // the old slots
	New     []NewSlot     `json:"new"`   // the new slots, with the orders inherited from the old slots
	// Unpinned contains the old slots whose pin is not kept by every new slot that gets some of
	// their keys.
	Unpinned []string `json:"unpinned"`
	// Undivided contains the outboxes with envelopes that stay in the first slot.
	Undivided []Undivided `json:"undivided"`
}

// NewSlot is a slot of the new division.
type NewSlot struct {
	Slot   string `json:"slot"`
	Paused bool   `json:"paused"`
	Pin    string `json:"pin,omitempty"`
}

// ResliceSlot is a slot of the old division.
type ResliceSlot struct {
	Slot     string     `json:"slot"`
	Owner    string     `json:"owner"` // "" if no node owns it
	Position *time.Time `json:"position,omitempty"`
}

// ErrResliceRejected is returned if a reslice is rejected. Nothing was changed.
var ErrResliceRejected = errors.New("the slots stay as they are")

// rejectionf returns an error that wraps ErrResliceRejected.
func rejectionf(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrResliceRejected, fmt.Errorf(format, args...))
}

// resliceRun is one reslice (N28). Its steps, in this order:
//
//  1. Every slot is paused. Its owner drains and releases.
//  2. Every lease is acquired, so that the documents are up to date.
//  3. Every transactional id is fenced, as in a takeover, so that no record of an old slot can be
//     appended to a topic after the read-back.
//  4. One transaction replaces the old documents by the new ones.
//
// Until the transaction commits, the old slots are intact but paused, and the reslice can be
// repeated. After the commit the reslice is complete.
type resliceRun struct {
	ResliceOptions
	cfg       config.Config
	log       *slog.Logger
	fence     *fence.Client
	state     state.Database
	watchers  *mongo.Collection
	divisions *divisions.Divisions

	ids    []string // of the old slots
	held   []*lease.Held
	orders slotOrders // for the new slots
}

// Reslice changes the number of slots of the watcher. If it fails before the transaction, the old
// slots continue.
func Reslice(
	ctx context.Context, cfg config.Config, log *slog.Logger,
	client *mongo.Client, brokers *fence.Client, want ResliceOptions,
) (ResliceReport, error) {
	run := &resliceRun{ResliceOptions: want, cfg: cfg, log: log, fence: brokers}
	if run.OnStep == nil {
		run.OnStep = func(string) {}
	}
	run.state = state.Open(client, cfg.State)
	run.watchers = mongodb.Majority(run.state.Collection("watchers"))
	run.divisions = divisions.New(run.state)

	if err := run.state.Check(ctx); err != nil {
		return ResliceReport{}, err
	}
	rep, err := run.planReslice(ctx)
	if err != nil || want.DryRun || rep.Done {
		return rep, err
	}

	if err := run.state.Ensure(ctx, log); err != nil {
		return rep, err
	}
	// A watcher that has never run has no documents to replace.
	if len(run.ids) == 0 {
		err = run.saveFirstDivision(ctx)
		rep.Done = err == nil
		return rep, err
	}

	if err := run.replaceSlots(ctx); err != nil {
		return rep, err
	}
	rep.Done = true
	run.orders.addTo(&rep)

	events := nodes.NewAuditLog(run.state.Collection("audit"), cfg.Watcher, "")
	err = events.Append(ctx, "resliced", bson.D{
		{Key: "from", Value: rep.From},
		{Key: "to", Value: rep.To},
		{Key: "actor", Value: want.Actor},
	})
	if err != nil {
		err = fmt.Errorf("done, but not written to the audit log: %w", err)
	}
	return rep, err
}

// saveFirstDivision saves the number of slots of a watcher that has never run. A process that
// starts at the same time either sees the new number after it has made its document, and gives up,
// or has checked the number before. In the latter case its document exists by now, and its number
// stays.
func (r *resliceRun) saveFirstDivision(ctx context.Context) error {
	r.OnStep("saving the number of slots: " + pluralize(r.Slots, "slot"))
	if err := r.divisions.Divide(ctx, r.cfg.Watcher, r.Slots); err != nil {
		return err
	}

	has, err := r.divisions.Documents(ctx, r.cfg.Watcher)
	if err != nil || has == 0 || has == r.Slots {
		return err
	}
	if err := r.divisions.Divide(ctx, r.cfg.Watcher, has); err != nil {
		return err
	}
	return rejectionf("watcher %s was started with %s at this moment; reslice it once it runs",
		r.cfg.Watcher, pluralize(has, "slot"))
}

// planReslice reads the current division and checks whether it can be replaced. The report is
// complete except for the outcome.
func (r *resliceRun) planReslice(ctx context.Context) (ResliceReport, error) {
	rep := ResliceReport{
		Watcher:   r.cfg.Watcher,
		To:        r.Slots,
		DryRun:    r.DryRun,
		Slots:     []ResliceSlot{},
		New:       []NewSlot{},
		Unpinned:  []string{},
		Undivided: []Undivided{},
	}
	if r.Slots < 1 || r.Slots > slot.MaxSlots {
		return rep, rejectionf("%d slots are not possible: choose from 1 to %d", r.Slots, slot.MaxSlots)
	}

	division, err := r.divisions.Read(ctx, r.cfg.Watcher)
	if err != nil && !errors.Is(err, mongodb.ErrNotFound) {
		return rep, err
	}
	if r.ids, err = r.divisions.IDs(ctx, r.cfg.Watcher); err != nil {
		return rep, err
	}

	rep.From = division.Of
	if division.Of == 0 && len(r.ids) > 0 {
		_, slotRange, _ := slot.ParseID(r.ids[0])
		rep.From = slotRange.N
	}
	if rep.From == r.Slots {
		rep.Done = true
		return rep, nil
	}
	if r.Slots > 1 {
		found, err := r.findUndivided(ctx)
		if err != nil {
			return rep, err
		}
		if !r.AllowUndivided {
			if err := rejectUndivided(found); err != nil {
				return rep, err
			}
		}
		rep.Undivided = append(rep.Undivided, found...)
	}
	if len(r.ids) == 0 {
		return rep, nil
	}

	var want []string
	for _, p := range slot.Ranges(rep.From) {
		want = append(want, p.ID(r.cfg.Watcher))
	}
	if !slices.Equal(r.ids, want) {
		return rep, rejectionf("watcher %s has %d slots and the documents %s: start outrelay run once, "+
			"or if one was lost run outrelay recover", r.cfg.Watcher, rep.From, strings.Join(r.ids, ", "))
	}

	var old []lease.Document
	for _, id := range r.ids {
		document, now, err := lease.Read(ctx, r.watchers, id)
		if err != nil {
			return rep, err
		}
		old = append(old, document)
		if err := r.checkReplaceable(&document); err != nil {
			return rep, err
		}

		one := ResliceSlot{Slot: id[len(r.cfg.Watcher)+1:]}
		if document.Owner != "" && document.ExpiresAt.After(now) {
			one.Owner = document.Node
		}
		if at, ok := document.Position().Time(); ok {
			moment := time.Unix(int64(at.T), 0).UTC()
			one.Position = &moment
		}
		rep.Slots = append(rep.Slots, one)
	}
	r.inheritOrders(old).addTo(&rep)
	return rep, nil
}

// checkReplaceable returns an error if the slot of document cannot be replaced yet.
func (r *resliceRun) checkReplaceable(document *lease.Document) error {
	switch {
	case document.Position().IsZero():
		return rejectionf("slot %s has no position yet; let it run first", document.ID)
	case document.Gap != nil:
		return rejectionf("slot %s sweeps a gap of its stream; let it finish first", document.ID)
	}
	return nil
}

// replaceSlots replaces the slots. If it fails, it restores the old slots.
func (r *resliceRun) replaceSlots(ctx context.Context) error {
	renew, stop := context.WithCancel(ctx)
	var renewing sync.WaitGroup
	done := false
	defer func() {
		stop()
		renewing.Wait()
		if !done {
			r.restoreSlots(ctx)
		}
	}()

	// The error of a renewal is ignored: the transaction fails with it, too.
	old, err := r.acquireAll(ctx, func(held *lease.Held) {
		renewing.Go(func() { _ = held.Run(renew, nil) })
	})
	if err != nil {
		return err
	}

	r.OnStep("fencing the senders of the slots")
	senders, err := r.fenceAll(ctx, old)
	if err != nil {
		return err
	}
	// A claim belongs to one slot, and its envelopes may get into several.
	for i, h := range r.held {
		if err := waiting.MoveClaims(ctx, h, r.state.Collection(waiting.ClaimsName), r.state.Collection("waiting"), r.cfg.Watcher, r.ids[i]); err != nil {
			return err
		}
	}
	crash.At("reslice-fenced")
	fresh, err := r.newDocuments(ctx, old, senders)
	if err != nil {
		return err
	}

	// The leases last without a renewal, which would only conflict with the transaction.
	stop()
	renewing.Wait()
	r.OnStep("writing " + pluralize(r.Slots, "new document"))
	if err := r.replaceDocuments(ctx, old, fresh); err != nil {
		return err
	}
	done = true
	crash.At("reslice-done")
	return nil
}

// newDocuments returns the documents of the new slots. Each has its own transactional id. It is
// initialized here, because the first owner has to read a marker above the last sender of its
// list, and cannot write markers for the ids of other slots (N4).
func (r *resliceRun) newDocuments(
	ctx context.Context, old []lease.Document, senders []record.Sender,
) ([]lease.Document, error) {
	parts := slot.Ranges(r.Slots)
	ids := make([]string, len(parts))
	for i, p := range parts {
		ids[i] = p.ID(r.cfg.Watcher)
	}

	docs := lease.Merge(ids, old, senders, func(document lease.Document) string { return outboxes.PosOf(document.Position()) })
	for i := range docs {
		sender, err := r.fence.InitTransactionalID(ctx, transactionalID(&docs[i], r.cfg.Watcher, parts[i]))
		if err != nil {
			return nil, err
		}
		docs[i].AddSender(sender)
	}
	return docs, nil
}

// pluralize returns n and noun, in the plural unless n is 1.
func pluralize(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

// transactionalID returns the transactional id of a slot, without its generation. N5
func transactionalID(document *lease.Document, watcher string, slot slot.Range) string {
	return fmt.Sprintf("outrelay.%s.%s.%s", document.Instance, watcher, slot)
}

// FenceInput returns the input of a takeover of a slot. doc is the watcher document as held acquired it. store has the waiting
// envelopes of the slot.
func FenceInput(cfg *config.Config, slot slot.Range, held *lease.Held, doc *lease.Document, store *waiting.Store) fence.In {
	in := fence.In{
		TransactionalID: transactionalID(doc, cfg.Watcher, slot),
		Offsets:         doc.OffsetMap(),
		Senders:         doc.Senders(),
		Gate:            held.Valid,
		Bounds: fence.Bounds{
			Bytes: int64(cfg.Kafka.ReadBack.Bytes), Time: cfg.Kafka.ReadBack.Time, Memory: int64(cfg.Limits.Memory),
		},
		Alive: held.RenewedBefore(),
	}
	// An owner that has not released the lease may have sent what follows the position.
	if held.AfterRelease() {
		in.Unneeded = store.Unneeded
	}
	return in
}

// replaceDocuments replaces the documents in one transaction. If the outcome of the transaction is
// unknown, it reads the number of slots to determine it.
func (r *resliceRun) replaceDocuments(ctx context.Context, old, fresh []lease.Document) error {
	// The end of ctx must not interrupt the transaction.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.Wait)
	defer cancel()
	err := mongodb.InTransaction(ctx, r.state.Client(), func(tx context.Context) error {
		control := func(id string, now []lease.Document) lease.Control {
			r.orders = r.inheritOrders(now)
			return r.orders.controls[id]
		}
		if err := lease.Replace(tx, r.state.Collection("watchers"), old, fresh, control); err != nil {
			return err
		}
		return divisions.InTransaction(r.state).DivideBegun(tx, r.cfg.Watcher, r.Slots)
	})
	if err == nil {
		return nil
	}

	// The response to the commit may be lost.
	if division, cause := r.divisions.Read(ctx, r.cfg.Watcher); cause == nil && division.Of == r.Slots {
		return nil
	}
	return fmt.Errorf("replacing the watcher documents: %w", err)
}

// slotOrders contains the orders of operators for the slots of a new division.
type slotOrders struct {
	watcher  string
	controls map[string]lease.Control // by id
	parts    []slot.Range
	unpinned []string
}

// inheritOrders derives the orders from the orders for the old slots (N28). Each new slot considers
// the old slots with some of its keys. It stays paused if an operator has paused any of them. It
// avoids the node that has to stay away longest. It keeps a pin if all of them were pinned to the
// same node. It passes over the events that one of them had to pass over.
func (r *resliceRun) inheritOrders(old []lease.Document) slotOrders {
	orders := slotOrders{watcher: r.cfg.Watcher, controls: map[string]lease.Control{}, parts: slot.Ranges(r.Slots)}
	for _, p := range orders.parts {
		had := slices.DeleteFunc(slices.Clone(old), func(document lease.Document) bool {
			_, slotRange, _ := slot.ParseID(document.ID)
			return !p.Overlaps(slotRange)
		})

		longest := slices.MaxFunc(had, func(a, b lease.Document) int {
			return a.Control.StepDownUntil.Compare(b.Control.StepDownUntil)
		})
		control := lease.Control{
			Pin:           had[0].Control.Pin,
			StepDownUntil: longest.Control.StepDownUntil,
			StepDownNode:  longest.Control.StepDownNode,
		}
		if i := slices.IndexFunc(had, func(document lease.Document) bool { return document.Control.IsByOperator() }); i >= 0 {
			control.PauseOrder = had[i].Control.PauseOrder
		}
		if slices.ContainsFunc(had, func(document lease.Document) bool { return document.Control.Pin != control.Pin }) {
			control.Pin = ""
		}
		for _, d := range had {
			for _, skip := range d.Control.Skips {
				if !slices.ContainsFunc(control.Skips, skip.IsSame) {
					control.Skips = append(control.Skips, skip)
				}
			}
		}
		orders.controls[p.ID(orders.watcher)] = control

		for _, d := range had {
			if d.Control.Pin != control.Pin && !slices.Contains(orders.unpinned, d.ID) {
				orders.unpinned = append(orders.unpinned, d.ID)
			}
		}
	}
	return orders
}

// addTo sets the new slots in the report.
func (o slotOrders) addTo(rep *ResliceReport) {
	rep.New = []NewSlot{}
	rep.Unpinned = []string{}
	for _, p := range o.parts {
		control := o.controls[p.ID(o.watcher)]
		rep.New = append(rep.New, NewSlot{Slot: p.String(), Paused: control.Paused, Pin: control.Pin})
	}
	for _, id := range o.unpinned {
		rep.Unpinned = append(rep.Unpinned, id[len(o.watcher)+1:])
	}
}
