package doctor

import (
	"cmp"
	_ "embed" // tested.json
	"encoding/json"
	"slices"
)

// testedRuns is tested.json: the runs of the core tests that TestRecordSupport has recorded.
//
//go:embed tested.json
var testedRuns []byte

// testRun is one run of the core tests on these versions of the servers.
type testRun struct {
	MongoDB  string   `json:"mongodb"`
	Kafka    string   `json:"kafka"`
	Date     string   `json:"date"`
	Platform string   `json:"platform"`
	Go       string   `json:"go"`
	Passed   []string `json:"passed"`
	Failed   []string `json:"failed,omitempty"`
}

// readRuns returns the runs of tested.json. A test reads the same file, so it is valid.
func readRuns() []testRun {
	var file struct{ Runs []testRun }
	if err := json.Unmarshal(testedRuns, &file); err != nil {
		panic(err)
	}
	return file.Runs
}

// Parts of the names of rows that are made from recorded runs.
const (
	recordedMongoDB = ", replica set of one member"
	recordedKafka   = ", KRaft, one broker"
)

// rowsOfRuns returns a row for each version of a server in the recorded runs, except the one that all tests run on. A version is
// tested if all its runs passed.
func rowsOfRuns(runs []testRun, area, all string, nameOf func(testRun) (version, name, other string)) (rows []supported) {
	for _, r := range runs {
		version, name, other := nameOf(r)
		if version == all {
			continue
		}

		row := supported{area, name, tested, "the core tests passed on " + r.Date + " with " + other}
		if len(r.Failed) > 0 {
			row.level, row.why = untested, "core tests failed on "+r.Date+" with "+other+": "+joinFew(r.Failed, 3)
		}
		at := slices.IndexFunc(rows, func(have supported) bool { return have.name == name })
		if at < 0 {
			rows = append(rows, row)
		} else if row.level == untested {
			rows[at] = row
		}
	}
	slices.SortFunc(rows, func(a, b supported) int { return cmp.Compare(b.name, a.name) })
	return rows
}

func mongoRow(run testRun) (version, name, other string) {
	return run.MongoDB, run.MongoDB + recordedMongoDB, "Kafka " + run.Kafka
}

func kafkaRow(run testRun) (version, name, other string) {
	return run.Kafka, "Apache Kafka " + run.Kafka + recordedKafka, "MongoDB " + run.MongoDB
}
