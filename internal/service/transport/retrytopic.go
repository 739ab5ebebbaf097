package transport

import (
	"fmt"
	"strconv"
	"strings"
)

// RetryTopicName returns the name of the n-th retry topic, from 1, of a topic for a group: "<topic>.<group>.retry.<n>".
func RetryTopicName(topic, group string, n int) string {
	return fmt.Sprintf("%s.%s.retry.%d", topic, group, n)
}

// ParseRetryTopic is the reverse of RetryTopicName. It returns "" and 0 for other names.
func ParseRetryTopic(topic, group string) (origin string, n int) {
	at := strings.LastIndex(topic, "."+group+".retry.")
	if at < 0 {
		return "", 0
	}
	n, err := strconv.Atoi(topic[at+len("."+group+".retry."):])
	if err != nil {
		return "", 0
	}
	return topic[:at], n
}
