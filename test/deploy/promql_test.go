package deploy

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/relay/problems"
)

// This file parses the subset of PromQL that the dashboard and the alerts use: selectors, functions,
// aggregations and operators. An unknown token is an error.

var token = regexp.MustCompile(`^(?:\s+|"(?:[^"\\]|\\.)*"|\$__\w+|\$\w+|[0-9]+(?:ms|[smhdwy])|[0-9]*\.?[0-9]+|[a-zA-Z_:][a-zA-Z0-9_:]*|=~|!~|!=|==|>=|<=|[-+*/%^<>=(){}\[\],@:])`)

var (
	functions = splitWords("rate increase delta changes histogram_quantile absent vector max_over_time min_over_time avg_over_time clamp_min clamp_max label_values")
	aggregate = splitWords("sum max min avg count topk")
	grouping  = splitWords("by without on ignoring group_left group_right")
	operators = splitWords("or and unless offset bool")
	// targets are the labels that a scrape adds, and the label of a slot.
	targets = splitWords("job instance slot")
	// bounded are the possible values of labels in selectors.
	bounded = map[string]map[string][]string{
		"outrelay_waiting_envelopes":      {"reason": splitWords("retry blocked parked queued")},
		"outrelay_nodes":                  {"state": splitWords("alive stale")},
		"outrelay_problem_seconds":        {"kind": kindsOfProblems(), "severity": splitWords("warn fail")},
		"outrelay_published_total":        {"result": splitWords("acked skipped rejected")},
		"outrelay_admin_rejected_total":   {"reason": splitWords("login origin host rate busy")},
		"outrelay_config_reloads_total":   {"result": splitWords("applied rejected"), "what": splitWords("settings certificates")},
		"outrelay_otlp_exports_total":     {"result": splitWords("ok failed"), "signal": splitWords("traces metrics")},
		"outrelay_consumer_commits_total": {"result": splitWords("ok failed")},
	}
)

// kindsOfProblems returns the values of the label kind.
func kindsOfProblems() (kinds []string) {
	for _, spec := range problems.Specs() {
		kinds = append(kinds, string(spec.Kind))
	}
	return kinds
}

func splitWords(s string) []string { return strings.Fields(s) }

// query holds the metrics and labels of an expression.
type query struct {
	metrics []string
	labels  []string // in groupings
	known   []string // labels of its metrics
}

// parseExpression checks an expression against the existing metrics.
func parseExpression(all map[string]family, expr string) (q query, err error) {
	toks, err := splitTokens(expr)
	if err != nil {
		return q, err
	}

	depth := []string{}
	at := func(i int) string {
		if i < len(toks) {
			return toks[i]
		}
		return ""
	}

	pairs := map[string]string{")": "(", "]": "[", "}": "{"}
	for i := 0; i < len(toks); i++ {
		switch tok := toks[i]; {
		case tok == "(" || tok == "[":
			depth = append(depth, tok)
		case pairs[tok] != "":
			if len(depth) == 0 || depth[len(depth)-1] != pairs[tok] {
				return q, fmt.Errorf("%q closes nothing", tok)
			}
			depth = depth[:len(depth)-1]

		case slices.Contains(grouping, tok):
			if at(i+1) != "(" {
				return q, fmt.Errorf("%s without labels", tok)
			}
			for i += 2; at(i) != ")"; i++ {
				if at(i) == "" {
					return q, fmt.Errorf("the labels of a grouping do not end")
				}
				if at(i) != "," {
					q.labels = append(q.labels, at(i))
				}
			}

		case slices.Contains(operators, tok) || !isName(tok):
		case at(i+1) == "(" || slices.Contains(aggregate, tok):
			if !slices.Contains(functions, tok) && !slices.Contains(aggregate, tok) {
				return q, fmt.Errorf("unknown function %s", tok)
			}

		default:
			if i, err = parseSelector(all, toks, i, &q); err != nil {
				return q, err
			}
		}
	}

	if len(depth) > 0 {
		return q, fmt.Errorf("%q is not closed", depth[len(depth)-1])
	}

	for _, l := range q.labels {
		if !slices.Contains(q.known, l) && !slices.Contains(targets, l) {
			return q, fmt.Errorf("grouped by %s, which none of its metrics has", l)
		}
	}
	return q, nil
}

// parseSelector parses a metric and its matchers, and returns the index of their last token.
func parseSelector(all map[string]family, toks []string, i int, q *query) (int, error) {
	name := toks[i]
	f, ok := findSeries(all, name)
	if !ok {
		return i, fmt.Errorf("there is no metric %s", name)
	}

	q.metrics, q.known = append(q.metrics, name), append(q.known, f.labels...)
	if i+1 >= len(toks) || toks[i+1] != "{" {
		return i, nil
	}

	for i += 2; i < len(toks) && toks[i] != "}"; i++ {
		if toks[i] == "," {
			continue
		}
		if i+2 >= len(toks) || !slices.Contains(splitWords("= != =~ !~"), toks[i+1]) || !strings.HasPrefix(toks[i+2], `"`) {
			return i, fmt.Errorf("a matcher of %s that cannot be read", name)
		}

		label, value := toks[i], strings.Trim(toks[i+2], `"`)
		if !slices.Contains(f.labels, label) && !slices.Contains(targets, label) {
			return i, fmt.Errorf("%s has no label %s", name, label)
		}
		if values := bounded[name][label]; values != nil {
			for one := range strings.SplitSeq(value, "|") {
				if !slices.Contains(values, one) {
					return i, fmt.Errorf("%s{%s} is never %q", name, label, one)
				}
			}
		} else if !strings.HasPrefix(value, "$") {
			return i, fmt.Errorf("the values of %s{%s} are not known to this test", name, label)
		}

		i += 2
	}

	if i >= len(toks) {
		return i, fmt.Errorf("the matchers of %s do not end", name)
	}
	return i, nil
}

func isName(tok string) bool {
	c := tok[0]
	return c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

func splitTokens(expr string) ([]string, error) {
	var out []string
	for rest := expr; rest != ""; {
		m := token.FindString(rest)
		if m == "" {
			return nil, fmt.Errorf("cannot be read from %q on", rest)
		}
		if rest = rest[len(m):]; strings.TrimSpace(m) != "" {
			out = append(out, m)
		}
	}
	return out, nil
}

func TestTheReaderOfExpressionsSeesMistakes(t *testing.T) {
	t.Parallel()
	all := collectMetrics(t)

	for expr, want := range map[string]string{
		`max(outrelay_lag_seconds{job=~"$job"})`: "",
		`histogram_quantile(0.99, sum by (le) (rate(outrelay_publish_latency_seconds_bucket[$__rate_interval])))`:            "",
		`sum(rate(outrelay_consumer_handled_total{group=~"$group"}[5m]))`:                                                    "",
		`max by (watcher, slot) (outrelay_lease_owner * on (job, instance) group_left (watcher) outrelay_watcher_info) == 0`: "",
		`max(outrelay_lags_seconds)`: "no metric",
		// The name of a histogram needs a suffix.
		`rate(outrelay_publish_latency_seconds[5m])`:                   "no metric",
		`rate(outrelay_lag_seconds_bucket[5m])`:                        "no metric",
		`sum by (topics) (outrelay_published_total)`:                   "grouped by topics",
		`sum by (le) (rate(outrelay_publish_latency_seconds_sum[5m]))`: "grouped by le",
		`outrelay_published_total{topics="x"}`:                         "no label topics",
		`outrelay_waiting_envelopes{reason=~"retry|stuck"}`:            "never",
		`sum(outrelay_lag_seconds`:                                     "not closed",
		`sum(outrelay_lag_seconds))`:                                   "closes nothing",
		`rate(outrelay_read_total[5m)`:                                 "closes nothing",
		`frob(outrelay_lag_seconds)`:                                   "unknown function",
		`outrelay_lag_seconds{job=~"$job"`:                             "do not end",
		`outrelay_lag_seconds > 5 ? 1`:                                 "cannot be read",
	} {
		_, err := parseExpression(all, expr)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", expr, err, want)
		}
	}
}
