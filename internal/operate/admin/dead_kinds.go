package admin

import (
	"context"
	"errors"
	"slices"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	handlerletters "github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// deadKinds are the kinds of letters that a filter may match.
type deadKinds struct{ relay, handlers bool }

// kindsOf returns the kinds of letters that filter may match. A condition that only one kind can fulfill selects that kind.
func (l Letters) kindsOf(ctx context.Context, filter DeadFilter) (deadKinds, error) {
	all := Classes()
	for _, class := range HandlerClasses() {
		if !slices.Contains(all, class) {
			all = append(all, class)
		}
	}
	if err := filter.checkValues(all); err != nil {
		return deadKinds{}, err
	}
	kinds := deadKinds{
		relay:    filter.Source != FromHandler && filter.Group+filter.Handler == "",
		handlers: filter.Source != FromRelay,
	}

	// With a source, the check of its classes states which exist.
	if filter.Source == "" && filter.Class != "" {
		kinds.relay = kinds.relay && slices.Contains(Classes(), filter.Class)
		kinds.handlers = kinds.handlers && slices.Contains(HandlerClasses(), filter.Class)
	}

	if filter.Source == "" && filter.Collection != "" && kinds.handlers {
		_, err := l.ofHandlers().openDesks(ctx, filter.Collection)
		var invalid *InvalidError
		switch {
		case err == nil:
			kinds.relay = false
		case errors.Is(err, mongodb.ErrNotFound) || errors.As(err, &invalid) || errors.Is(err, ErrNoCollections):
			kinds.handlers = false
		default:
			return kinds, err
		}
	}
	return kinds, nil
}

// sourceOf returns who gave up the event that ref identifies. It returns an error if the relay and a handler did.
func (l Letters) sourceOf(ctx context.Context, ref DeadRef) (string, error) {
	_, _, isRow := parseRow[handlerletters.ID](ref.ID)
	switch {
	case ref.Source != "":
		return ref.Source, nil
	case ref.Group+ref.Handler != "":
		return FromHandler, nil
	case letters.IsID(ref.ID):
		return FromRelay, nil
	case isRow:
		return FromHandler, nil
	case ref.Collection != "":
		kinds, err := l.kindsOf(ctx, DeadFilter{Collection: ref.Collection})
		if err != nil || kinds.relay {
			return FromRelay, err
		}
		return FromHandler, nil
	}

	_, relayErr := l.findLetter(ctx, ref)
	_, _, handlerErr := l.ofHandlers().find(ctx, ref)
	ofRelay, ofHandler := !isAbsent(relayErr), !isAbsent(handlerErr)
	if ofRelay && ofHandler {
		return "", invalidRequest("id %s has dead letters of the relay and of handlers; choose the source relay or handler, or pass the id of the letter", ref.ID)
	}
	if ofHandler {
		return FromHandler, nil
	}
	// The error of a letter that does not exist is that of the relay.
	return FromRelay, nil
}

// isAbsent reports whether a search has found nothing.
func isAbsent(err error) bool {
	return errors.Is(err, mongodb.ErrNotFound) || errors.Is(err, ErrNoCollections)
}
