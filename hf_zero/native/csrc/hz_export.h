// Marks the functions that Python calls. Everything else stays hidden, so two libraries cannot mix up their insides.
#pragma once

#define HZ_API extern "C" __attribute__((visibility("default")))
