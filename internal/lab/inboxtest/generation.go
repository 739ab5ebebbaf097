package inboxtest

import (
	"errors"
	"strings"

	"github.com/outrelay/outrelay/internal/service/inbox"
)

// attachConfirmed calls attachLogConfirmed with a log whose topic has no id.
func (s suite) attachConfirmed(target *inbox.Inbox, end int64, epoch int32) (inbox.Generation, error) {
	return s.attachLogConfirmed(target, inbox.Log{End: end, Epoch: epoch})
}

// attachLogConfirmed attaches, and again if the first result must be confirmed, with the same log.
func (s suite) attachLogConfirmed(target *inbox.Inbox, log inbox.Log) (inbox.Generation, error) {
	generation, err := target.Attach(s.ctx(), consumerA, topic, 3, log)
	if errors.Is(err, inbox.ErrUnconfirmed) {
		return target.Attach(s.ctx(), consumerA, topic, 3, log)
	}
	return generation, err
}

// checkAttachLog attaches and fails the test unless the generation is want.
func (s suite) checkAttachLog(log inbox.Log, want inbox.Generation) {
	s.Helper()
	got, err := s.attachLogConfirmed(s.Inbox, log)
	s.checkSuccess(err)
	if got != want {
		s.Fatalf("the generation is %+v, want %+v", got, want)
	}
}

// checkAttach is checkAttachLog for a log whose topic has no id.
func (s suite) checkAttach(inbox *inbox.Inbox, end int64, epoch int32, want inbox.Generation) {
	s.Helper()
	got, err := s.attachConfirmed(inbox, end, epoch)
	s.checkSuccess(err)
	if got != want {
		s.Fatalf("the generation is %+v, want %+v", got, want)
	}
}

func generationByEnd(suite suite) {
	suite.checkAttach(suite.Inbox, 0, 5, inbox.Generation{})
	suite.checkFresh([]bool{true, true, true}, placedEntry("1", 0, 10), entryWithoutID(0, 11), placedEntry("2", 1, 20))
	suite.checkAttach(suite.Inbox, 21, 5, inbox.Generation{Watermark: 21}) // all records were handled
	// Transaction markers and compaction leave gaps.
	suite.checkAttach(suite.Inbox, 500, 5, inbox.Generation{Watermark: 21})
	suite.checkAttach(suite.Inbox, -1, -1, inbox.Generation{Watermark: 21}) // the log is unknown
	suite.checkFresh([]bool{false, false}, entryWithoutID(0, 11), placedEntry("2", 1, 20))
	suite.checkSuccess(suite.finishClaim(suite.mustClaim(suite.Inbox, entryWithoutID(0, 12))))
	suite.checkAttach(suite.Inbox, 20, 5, inbox.Generation{Number: 1, Recreated: true})
	suite.checkSuccess(suite.mustClaim(suite.Inbox, entryWithoutID(0, 12)).Release(suite.ctx()))

	// The places are new, but the ids are the same.
	suite.checkFresh([]bool{true, true, false, true},
		placedEntry("3", 0, 3), entryWithoutID(0, 11), placedEntry("1", 0, 12), placedEntry("4", 1, 4))
	suite.checkFresh([]bool{false, false}, placedEntry("3", 0, 3), entryWithoutID(0, 11))
	suite.checkAttach(suite.Inbox, 13, 5, inbox.Generation{Number: 1, Watermark: 13})
	suite.checkAttach(suite.Inbox, 0, 5, inbox.Generation{Number: 2, Recreated: true})
	suite.checkSuccess(suite.finishClaim(suite.mustClaim(suite.Inbox, entryWithoutID(0, 11))))
	_, err := suite.Inbox.Claim(suite.ctx(), entryWithoutID(0, 11), 0)
	suite.checkError(err, inbox.ErrDuplicate)
}

func generationByEpoch(suite suite) {
	suite.checkAttach(suite.Inbox, 100, 4, inbox.Generation{})
	// The leader epoch of the entry is 5.
	suite.checkFresh([]bool{true}, placedEntry("1", 0, 10))
	suite.checkAttach(suite.Inbox, 100, 5, inbox.Generation{Watermark: 11})
	suite.checkAttach(suite.Inbox, 100, -1, inbox.Generation{Watermark: 11})
	suite.checkAttach(suite.Inbox, 100, 7, inbox.Generation{Watermark: 11})
	suite.checkAttach(suite.Inbox, 100, 6, inbox.Generation{Number: 1, Recreated: true})
	suite.checkFresh([]bool{true}, placedEntry("2", 0, 0))
	suite.checkAttach(suite.Inbox, 100, 6, inbox.Generation{Number: 1, Watermark: 1})
}

func generationByTopicID(suite suite) {
	suite.checkAttachLog(inbox.Log{ID: "c/a", End: 0, Epoch: 5}, inbox.Generation{})
	suite.checkFresh([]bool{true, true}, placedEntry("1", 0, 10), placedEntry("2", 1, 20))
	suite.checkAttachLog(inbox.Log{ID: "c/a", End: 500, Epoch: 5}, inbox.Generation{Watermark: 21})
	suite.checkAttachLog(inbox.Log{End: 500, Epoch: 5}, inbox.Generation{Watermark: 21}) // the id is unknown

	// These are another topic with the same name and as many records, and a topic of another
	// cluster.
	suite.checkAttachLog(inbox.Log{ID: "c/b", End: 500, Epoch: 5}, inbox.Generation{Number: 1, Recreated: true})
	suite.checkFresh([]bool{true}, placedEntry("3", 0, 10))
	suite.checkAttachLog(inbox.Log{ID: "d/b", End: 500, Epoch: 5}, inbox.Generation{Number: 2, Recreated: true})
	suite.checkFresh([]bool{true}, placedEntry("4", 0, 10))

	// A former leader that still results belongs to the same topic.
	suite.checkAttachLog(inbox.Log{ID: "d/b", End: 500, Epoch: 3}, inbox.Generation{Number: 2, Watermark: 11})
}

// withEpoch returns an entry of a leader with another epoch than 5.
func withEpoch(entry inbox.Entry, epoch int32) inbox.Entry {
	entry.Place.LeaderEpoch = epoch
	return entry
}

// lostRecords checks the records of a leader that has lost handled records and has others at their offsets.
func lostRecords(suite suite) {
	suite.checkAttachLog(inbox.Log{ID: "c/a", End: 0, Epoch: 5}, inbox.Generation{})
	suite.checkFresh([]bool{true, true, true, true, true},
		placedEntry("1", 0, 17), placedEntry("2", 1, 20), entryWithoutID(2, 15), entryWithoutID(2, 30), placedEntry("3", 3, 22))
	// The leader with epoch 6 has the records below offset 12 only.
	suite.checkAttachLog(inbox.Log{ID: "c/a", End: 12, Epoch: 6}, inbox.Generation{Watermark: 31})

	// These records are still there, and the last one cannot be read.
	suite.checkFresh([]bool{false, false, false}, placedEntry("4", 0, 10), placedEntry("4", 1, 11), withEpoch(entryWithoutID(2, 11), -1))
	// These have the places of lost ones. The last one was sent again with its id.
	suite.checkFresh([]bool{true, true, false},
		withEpoch(placedEntry("5", 1, 12), 6), withEpoch(entryWithoutID(2, 15), 6), withEpoch(placedEntry("3", 3, 22), 6))
	suite.checkFresh([]bool{false, false, false, true, true},
		placedEntry("4", 1, 11), withEpoch(placedEntry("6", 1, 12), 6), withEpoch(entryWithoutID(2, 15), 6),
		withEpoch(placedEntry("7", 1, 13), 6), withEpoch(entryWithoutID(2, 16), 7))

	// The same holds for the other ways to move a watermark.
	next := withEpoch(placedEntry("8", 0, 13), 6)
	suite.checkSuccess(suite.Inbox.Pass(suite.ctx(), []inbox.Entry{next}))
	suite.checkFresh([]bool{false, true}, next, withEpoch(placedEntry("9", 0, 14), 6))
	claimed := withEpoch(placedEntry("10", 3, 21), 7)
	suite.checkSuccess(suite.finishClaim(suite.mustClaim(suite.Inbox, claimed)))
	_, err := suite.Inbox.Claim(suite.ctx(), claimed, 0)
	suite.checkError(err, inbox.ErrDuplicate)
}

// lostRecordsOfAnother checks that records that were lost, but that another process still has in memory, hide no record of the new
// leader.
func lostRecordsOfAnother(suite suite) {
	suite.checkFresh([]bool{true, true}, placedEntry("1", 0, 10), withEpoch(placedEntry("2", 0, 8), 6))
	_, err := suite.admitInTransaction(suite.Other, placedEntry("3", 0, 12))
	suite.checkSuccess(err)
	suite.checkFresh([]bool{false, true, true},
		withEpoch(placedEntry("2", 0, 8), 6), withEpoch(placedEntry("4", 0, 9), 6), withEpoch(placedEntry("5", 0, 13), 6))
	suite.checkFresh([]bool{false}, withEpoch(placedEntry("6", 0, 13), 6))
}

func lossHalts(suite suite) {
	suite.checkAttachLog(inbox.Log{ID: "c/a", End: 0, Epoch: 5}, inbox.Generation{})
	suite.checkFresh([]bool{true}, placedEntry("1", 0, 20))
	lossy := inbox.Log{ID: "c/a", End: 20, Epoch: 6}
	for range 2 {
		_, err := suite.attachLogConfirmed(suite.Halting, lossy)
		suite.checkError(err, inbox.ErrRecreated)
	}

	// A process that does not halt accepts the loss.
	suite.checkAttachLog(lossy, inbox.Generation{Watermark: 21})
	_, err := suite.attachLogConfirmed(suite.Halting, lossy)
	suite.checkSuccess(err)
	_, err = suite.attachLogConfirmed(suite.Halting, inbox.Log{ID: "c/a", End: 19, Epoch: 7})
	suite.checkError(err, inbox.ErrRecreated)
}

func generationHalts(suite suite) {
	suite.checkAttach(suite.Halting, 100, 5, inbox.Generation{})
	suite.checkFresh([]bool{true}, placedEntry("1", 0, 10))
	for range 2 {
		_, err := suite.attachConfirmed(suite.Halting, 4, 5)
		suite.checkError(err, inbox.ErrRecreated)
		place := "partition 3 of " + topic + " ends at offset 4"
		if !strings.Contains(err.Error(), place) || !strings.Contains(err.Error(), consumerA+" has handled up to offset 11") {
			suite.Fatalf("the error is %v, want it to name the partition, its end 4 and the watermark 11", err)
		}
	}

	suite.checkFresh([]bool{false}, placedEntry("2", 0, 5))
	// Another process begins the generation.
	suite.checkAttach(suite.Inbox, 4, 5, inbox.Generation{Number: 1, Recreated: true})
	suite.checkAttach(suite.Halting, 4, 5, inbox.Generation{Number: 1})
}

// generationOfAnother checks that a process cannot use records of a deleted topic after another
// process has detected the new topic. They would move the watermark of the new topic, which then
// would reject earlier records.
func generationOfAnother(suite suite) {
	suite.checkAttach(suite.Other, 100, 5, inbox.Generation{})
	suite.checkFresh([]bool{true}, placedEntry("1", 0, 50))
	suite.checkAttach(suite.Inbox, 7, 5, inbox.Generation{Number: 1, Recreated: true})
	for _, e := range []inbox.Entry{placedEntry("2", 0, 60), placedEntry("3", 9, 60)} {
		_, err := suite.admitInTransaction(suite.Other, e)
		suite.checkError(err, inbox.ErrStale)
		suite.checkError(suite.Other.Pass(suite.ctx(), []inbox.Entry{e}), inbox.ErrStale)
		_, err = suite.Other.Claim(suite.ctx(), e, 0)
		suite.checkError(err, inbox.ErrStale)
	}

	suite.checkFresh([]bool{true, true}, placedEntry("4", 0, 5), placedEntry("5", 9, 6))
	suite.checkAttach(suite.Other, 7, 5, inbox.Generation{Number: 1, Watermark: 7})
	suite.checkFresh([]bool{true}, placedEntry("6", 0, 60))
}
