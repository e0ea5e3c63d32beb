package embedetcd

import (
	"fmt"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// quietLogger writes errors to standard error, one line each.
func quietLogger() (*zap.Logger, error) {
	c := zap.NewProductionConfig()
	c.Level = zap.NewAtomicLevelAt(zap.ErrorLevel)
	c.Encoding = "console"
	c.EncoderConfig.EncodeTime = zapcore.ISO8601TimeEncoder
	c.DisableStacktrace = true
	logger, err := c.Build()
	if err != nil {
		return nil, fmt.Errorf("etcd logger: %w", err)
	}
	return logger, nil
}

// falseAlarms are errors that etcd logs although nothing is wrong.
var falseAlarms = map[string]bool{
	// A new store has no term before its first commit (100 ms after the start at most), but a member that is alone elects itself, and
	// tries to write the version, before that. etcd tries again 4 s later.
	"failed to update storage version": true,
}

func dropFalseAlarms(c zapcore.Core) zapcore.Core { return alarmFilter{c} }

// alarmFilter is a Core without falseAlarms.
type alarmFilter struct{ zapcore.Core }

func (f alarmFilter) With(fields []zapcore.Field) zapcore.Core {
	return alarmFilter{f.Core.With(fields)}
}

func (f alarmFilter) Check(entry zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if falseAlarms[entry.Message] {
		return checked
	}
	return f.Core.Check(entry, checked)
}
