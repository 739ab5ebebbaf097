package admin

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
)

// letterSource is a store of dead letters: that of the relay, or a collection of handlers.
type letterSource struct {
	name string // "" for the relay

	// count returns how many letters match the filter.
	count func() (int64, error)

	// read returns up to limit letters that match the filter, the newest first: those after a cursor, and those that died before
	// a time unless it is zero. Each has its cursor.
	read func(after string, before time.Time, limit int) ([]DeadLetter, error)
}

// letterPlace is the place of a letter in a list that is ordered by time, the newest first, and then by the names of the sources.
type letterPlace struct {
	Source string    `bson:"s"`
	At     time.Time `bson:"t"`
	Cursor string    `bson:"c"` // in the source
}

// beginOf returns where the rest of a source begins.
func (p letterPlace) beginOf(source string) (after string, before time.Time) {
	switch {
	case p.At.IsZero():
		return "", time.Time{}
	case source == p.Source:
		return p.Cursor, time.Time{}
	case source > p.Source:
		// Letters of the same millisecond follow in the sources after this one.
		return "", p.At.Add(time.Millisecond)
	}
	return "", p.At
}

// List returns a page of dead letters of both kinds without their envelopes, newest first. limit defaults to [DefaultPage]. after is Next of
// the previous page.
//
// A watcher that has read no collection yet has no dead letters.
func (l Letters) List(ctx context.Context, filter DeadFilter, limit int, after string) (Page[DeadLetter], error) {
	page := newPage[DeadLetter]()
	var place letterPlace
	if after != "" {
		if listing.ParseCursor(after, &place) != nil || place.At.IsZero() {
			return page, listing.ErrCursor
		}
	}
	sources, err := l.findSources(ctx, filter)
	if err != nil {
		return page, err
	}

	// Each source is read up to the size of the page, because all letters of the page may be in it. One letter more shows whether there
	// is another page.
	limit = pageSize(limit)
	var all []DeadLetter
	for _, source := range sources {
		n, err := source.count()
		if err != nil {
			return page, err
		}
		page.Total += n

		cursor, before := place.beginOf(source.name)
		list, err := source.read(cursor, before, limit+1)
		if err != nil {
			return page, err
		}
		for i := range list {
			list[i].origin.source = source.name
		}
		all = append(all, list...)
	}
	slices.SortStableFunc(all, func(a, b DeadLetter) int { return b.DiedAt.Compare(a.DiedAt) })

	if len(all) > limit {
		all = all[:limit]
		last := &all[limit-1]
		if page.Next, err = listing.EncodeCursor(letterPlace{last.origin.source, last.DiedAt, last.origin.cursor}); err != nil {
			return page, err
		}
	}
	page.Items = append(page.Items, all...)
	return page, nil
}

// findSources returns the stores of letters that filter may match, in the order of their names.
func (l Letters) findSources(ctx context.Context, filter DeadFilter) (sources []letterSource, err error) {
	kinds, err := l.kindsOf(ctx, filter)
	if err != nil {
		return nil, err
	}

	if kinds.relay {
		source, err := l.sourceOfRelay(ctx, filter)
		if err != nil {
			return nil, err
		}
		sources = append(sources, source)
	}
	if kinds.handlers {
		ofHandlers, err := l.ofHandlers().sources(ctx, filter)
		if err != nil {
			return nil, err
		}
		sources = append(sources, ofHandlers...)
	}

	// beginOf compares the names. "a-b.x" comes before "a.x", although database "a" comes before "a-b".
	slices.SortFunc(sources, func(a, b letterSource) int { return cmp.Compare(a.name, b.name) })
	return sources, nil
}

func (l Letters) sourceOfRelay(ctx context.Context, filter DeadFilter) (letterSource, error) {
	query, err := l.query(filter)
	if err != nil {
		return letterSource{}, err
	}

	count := func() (int64, error) {
		n, err := letters.Count(ctx, l.op.letters(), query)
		if err == nil && n == 0 && filter.Collection != "" {
			err = l.checkNames(ctx, filter.Collection)
		}
		return n, err
	}

	read := func(after string, before time.Time, limit int) ([]DeadLetter, error) {
		rest := query
		rest.To = earlierEnd(rest.To, before)
		found, _, err := letters.List(ctx, l.op.letters(), rest, limit, after)
		if err != nil {
			return nil, err
		}
		list := make([]DeadLetter, len(found))
		for i := range found {
			list[i] = newDeadLetter(&found[i])
			if list[i].origin.cursor, err = letters.CursorOf(&found[i]); err != nil {
				return nil, err
			}
		}
		return list, nil
	}
	return letterSource{count: count, read: read}, nil
}

// sources returns the collections of letters of handlers.
func (h handlerLetters) sources(ctx context.Context, filter DeadFilter) ([]letterSource, error) {
	desks, err := h.resolve(ctx, filter)
	if err != nil {
		return nil, err
	}

	sources := make([]letterSource, len(desks))
	for i, desk := range desks {
		count := func() (int64, error) { return desk.Count(ctx, desk.query) }
		read := func(after string, before time.Time, limit int) (list []DeadLetter, err error) {
			rest := desk.query
			rest.After, rest.Before, rest.NoValues = after, earlierEnd(rest.Before, before), true
			for letter, err := range desk.List(ctx, rest) {
				if err != nil {
					return nil, err
				}
				shown := newHandlerLetter(desk.ns, &letter)
				shown.origin.cursor = letter.Cursor()
				if list = append(list, shown); len(list) == limit {
					break
				}
			}
			return list, nil
		}
		sources[i] = letterSource{name: desk.ns, count: count, read: read}
	}
	return sources, nil
}

// earlierEnd returns the earlier one of two ends; a zero time is none.
func earlierEnd(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
