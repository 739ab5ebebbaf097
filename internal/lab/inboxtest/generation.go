package inboxtest

import (
	"errors"
	"strings"

	"github.com/outrelay/outrelay/internal/service/inbox"
)

// attachConfirmed calls attachLogConfirmed with a log whose topic has no id.
func (s suite) attachConfirmed(x *inbox.Inbox, end int64, epoch int32) (inbox.Generation, error) {
	return s.attachLogConfirmed(x, inbox.Log{End: end, Epoch: epoch})
}

// attachLogConfirmed attaches, and again if the first answer must be confirmed, with the same log.
func (s suite) attachLogConfirmed(x *inbox.Inbox, l inbox.Log) (inbox.Generation, error) {
	g, err := x.Attach(s.ctx(), consumerA, topic, 3, l)
	if errors.Is(err, inbox.ErrUnconfirmed) {
		return x.Attach(s.ctx(), consumerA, topic, 3, l)
	}
	return g, err
}

// checkAttachLog attaches and fails the test unless the generation is want.
func (s suite) checkAttachLog(l inbox.Log, want inbox.Generation) {
	s.Helper()
	got, err := s.attachLogConfirmed(s.Inbox, l)
	s.checkSuccess(err)
	if got != want {
		s.Fatalf("the generation is %+v, want %+v", got, want)
	}
}

// checkAttach is checkAttachLog for a log whose topic has no id.
func (s suite) checkAttach(x *inbox.Inbox, end int64, epoch int32, want inbox.Generation) {
	s.Helper()
	got, err := s.attachConfirmed(x, end, epoch)
	s.checkSuccess(err)
	if got != want {
		s.Fatalf("the generation is %+v, want %+v", got, want)
	}
}

func generationByEnd(s suite) {
	s.checkAttach(s.Inbox, 0, 5, inbox.Generation{})
	s.checkFresh([]bool{true, true, true}, placedEntry("1", 0, 10), entryWithoutID(0, 11), placedEntry("2", 1, 20))
	s.checkAttach(s.Inbox, 21, 5, inbox.Generation{Watermark: 21}) // all records were handled
	// Transaction markers and compaction leave gaps.
	s.checkAttach(s.Inbox, 500, 5, inbox.Generation{Watermark: 21})
	s.checkAttach(s.Inbox, -1, -1, inbox.Generation{Watermark: 21}) // the log is unknown
	s.checkFresh([]bool{false, false}, entryWithoutID(0, 11), placedEntry("2", 1, 20))
	s.checkSuccess(s.finishClaim(s.mustClaim(s.Inbox, entryWithoutID(0, 12))))
	s.checkAttach(s.Inbox, 20, 5, inbox.Generation{Number: 1, Recreated: true})
	s.checkSuccess(s.mustClaim(s.Inbox, entryWithoutID(0, 12)).Release(s.ctx()))

	// The places are new, but the ids are the same.
	s.checkFresh([]bool{true, true, false, true},
		placedEntry("3", 0, 3), entryWithoutID(0, 11), placedEntry("1", 0, 12), placedEntry("4", 1, 4))
	s.checkFresh([]bool{false, false}, placedEntry("3", 0, 3), entryWithoutID(0, 11))
	s.checkAttach(s.Inbox, 13, 5, inbox.Generation{Number: 1, Watermark: 13})
	s.checkAttach(s.Inbox, 0, 5, inbox.Generation{Number: 2, Recreated: true})
	s.checkSuccess(s.finishClaim(s.mustClaim(s.Inbox, entryWithoutID(0, 11))))
	_, err := s.Inbox.Claim(s.ctx(), entryWithoutID(0, 11), 0)
	s.checkError(err, inbox.ErrDuplicate)
}

func generationByEpoch(s suite) {
	s.checkAttach(s.Inbox, 100, 4, inbox.Generation{})
	// The leader epoch of the entry is 5.
	s.checkFresh([]bool{true}, placedEntry("1", 0, 10))
	s.checkAttach(s.Inbox, 100, 5, inbox.Generation{Watermark: 11})
	s.checkAttach(s.Inbox, 100, -1, inbox.Generation{Watermark: 11})
	s.checkAttach(s.Inbox, 100, 7, inbox.Generation{Watermark: 11})
	s.checkAttach(s.Inbox, 100, 6, inbox.Generation{Number: 1, Recreated: true})
	s.checkFresh([]bool{true}, placedEntry("2", 0, 0))
	s.checkAttach(s.Inbox, 100, 6, inbox.Generation{Number: 1, Watermark: 1})
}

func generationByTopicID(s suite) {
	s.checkAttachLog(inbox.Log{ID: "c/a", End: 0, Epoch: 5}, inbox.Generation{})
	s.checkFresh([]bool{true, true}, placedEntry("1", 0, 10), placedEntry("2", 1, 20))
	s.checkAttachLog(inbox.Log{ID: "c/a", End: 500, Epoch: 5}, inbox.Generation{Watermark: 21})
	s.checkAttachLog(inbox.Log{End: 500, Epoch: 5}, inbox.Generation{Watermark: 21}) // the id is unknown

	// These are another topic with the same name and as many records, and a topic of another
	// cluster.
	s.checkAttachLog(inbox.Log{ID: "c/b", End: 500, Epoch: 5}, inbox.Generation{Number: 1, Recreated: true})
	s.checkFresh([]bool{true}, placedEntry("3", 0, 10))
	s.checkAttachLog(inbox.Log{ID: "d/b", End: 500, Epoch: 5}, inbox.Generation{Number: 2, Recreated: true})
	s.checkFresh([]bool{true}, placedEntry("4", 0, 10))

	// A former leader that still answers belongs to the same topic.
	s.checkAttachLog(inbox.Log{ID: "d/b", End: 500, Epoch: 3}, inbox.Generation{Number: 2, Watermark: 11})
}

func truncatedTopic(s suite) {
	s.checkAttachLog(inbox.Log{ID: "c/a", End: 0, Epoch: 5}, inbox.Generation{})
	s.checkFresh([]bool{true, true}, placedEntry("1", 0, 10), placedEntry("2", 1, 20))
	s.checkAttachLog(inbox.Log{ID: "c/a", End: 20, Epoch: 6}, inbox.Generation{Watermark: 20})
	s.checkFresh([]bool{false, true, false}, placedEntry("3", 0, 9), placedEntry("4", 1, 20), placedEntry("2", 1, 21))
	_, err := s.attachLogConfirmed(s.Halting, inbox.Log{ID: "c/a", End: 20, Epoch: 6})
	s.checkError(err, inbox.ErrRecreated)
}

func generationHalts(s suite) {
	s.checkAttach(s.Halting, 100, 5, inbox.Generation{})
	s.checkFresh([]bool{true}, placedEntry("1", 0, 10))
	for range 2 {
		_, err := s.attachConfirmed(s.Halting, 4, 5)
		s.checkError(err, inbox.ErrRecreated)
		place := "partition 3 of " + topic + " ends at offset 4"
		if !strings.Contains(err.Error(), place) || !strings.Contains(err.Error(), consumerA+" has handled up to offset 11") {
			s.Fatalf("the error is %v, want it to name the partition, its end 4 and the watermark 11", err)
		}
	}

	s.checkFresh([]bool{false}, placedEntry("2", 0, 5))
	// Another process begins the generation.
	s.checkAttach(s.Inbox, 4, 5, inbox.Generation{Number: 1, Recreated: true})
	s.checkAttach(s.Halting, 4, 5, inbox.Generation{Number: 1})
}

// generationOfAnother checks that a process cannot use records of a deleted topic after another
// process has detected the new topic. They would move the watermark of the new topic, which then
// would reject earlier records.
func generationOfAnother(s suite) {
	s.checkAttach(s.Other, 100, 5, inbox.Generation{})
	s.checkFresh([]bool{true}, placedEntry("1", 0, 50))
	s.checkAttach(s.Inbox, 7, 5, inbox.Generation{Number: 1, Recreated: true})
	for _, e := range []inbox.Entry{placedEntry("2", 0, 60), placedEntry("3", 9, 60)} {
		_, err := s.admitInTransaction(s.Other, e)
		s.checkError(err, inbox.ErrStale)
		s.checkError(s.Other.Pass(s.ctx(), []inbox.Entry{e}), inbox.ErrStale)
		_, err = s.Other.Claim(s.ctx(), e, 0)
		s.checkError(err, inbox.ErrStale)
	}

	s.checkFresh([]bool{true, true}, placedEntry("4", 0, 5), placedEntry("5", 9, 6))
	s.checkAttach(s.Other, 7, 5, inbox.Generation{Number: 1, Watermark: 7})
	s.checkFresh([]bool{true}, placedEntry("6", 0, 60))
}
